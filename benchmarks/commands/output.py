"""Options that several benchmark commands have, and the function that prints a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Data type of matrix products; auto is bfloat16 on cuda and float32 on cpu.",
)


def show(report: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    """Print `report` as one JSON object, or print `lines`."""
    click.echo(json.dumps(report, default=str) if as_json else "\n".join(lines))
