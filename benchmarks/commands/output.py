"""What benchmarks share: some options, and printing a report for people or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of the model's matrix products; auto is bfloat16 on cuda, float32 on cpu.",
)


def show(report: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    """The report as one JSON object, or as lines for people."""
    click.echo(json.dumps(report, default=str) if as_json else "\n".join(lines))
