"""What commands share: some options, and printing a result for people or as JSON."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of the joint encoder's matrix products: bfloat16 takes about half the time on processors that have it, "
    "more on others; auto is bfloat16 on cuda, float32 on cpu.",
)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, on one line."""
    click.echo(json.dumps(value, sort_keys=True))


def note(message: str) -> None:
    """A line for people, on standard error."""
    click.echo(message, err=True)


def this_command() -> str:
    """The command line of this process, as one would type it."""
    return shlex.join(["edje-index", *sys.argv[1:]])
