"""What commands share: the --json option, and printing a result either way."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, on one line."""
    click.echo(json.dumps(value, sort_keys=True))


def note(message: str) -> None:
    """A line for people, on standard error."""
    click.echo(message, err=True)


def this_command() -> str:
    """The command line of this process, as one would type it."""
    return shlex.join(["edje-index", *sys.argv[1:]])
