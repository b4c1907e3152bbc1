"""Prints the report of a command of `edje-index bench`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click


def show(report: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    """Print `report` as one JSON object if `as_json` is True; otherwise print `lines`."""
    click.echo(json.dumps(report, default=str) if as_json else "\n".join(lines))
