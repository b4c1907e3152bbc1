"""Printing a benchmark's report either way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def show(report: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    """The report as one JSON object, or as lines for people."""
    click.echo(json.dumps(report, default=str) if as_json else "\n".join(lines))
