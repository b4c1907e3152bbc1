"""Shared by commands: common options, and printing results as text or as JSON."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from pipelines.progress.events import OnEvent
from pipelines.progress.stopping import JobStopped, ShouldStop
from pipelines.progress.wording import printable

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
quiet_option = click.option("--quiet", is_flag=True, help="Show no progress.")

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Data type of the joint encoder's matrix products. bfloat16 is about twice as fast on processors that "
    "support it, and slower on others. auto is bfloat16 on cuda and float32 on cpu.",
)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on one line."""
    click.echo(json.dumps(value, sort_keys=True))


def print_line(text: str) -> None:
    """Print a line of the result; control characters are escaped."""
    click.echo(printable(text))


def note(message: str) -> None:
    """Print a line on standard error; control characters are escaped."""
    click.echo(printable(message), err=True)


def this_command() -> str:
    """The command line of this process, as one would type it."""
    return shlex.join(["edje-index", *sys.argv[1:]])


@contextlib.contextmanager
def running_job(*, quiet: bool, can_resume: Callable[[], bool] = lambda: True) -> Iterator[tuple[OnEvent, ShouldStop]]:
    """Yield the callbacks of a job: one shows its progress, the other tells it to stop after a signal.

    If the job stops early and `can_resume()` returns True, the error says how to resume it. Standard output carries
    only the result, so what libraries print (Ray's messages about dead workers, for example) goes to standard error.
    """
    from pipelines.progress.display import progress_display
    from pipelines.progress.stopping import stop_on_signals

    try:
        with (
            contextlib.redirect_stdout(sys.stderr),
            stop_on_signals() as should_stop,
            progress_display(quiet=quiet) as on_event,
        ):
            yield on_event, should_stop
    except (JobStopped, KeyboardInterrupt) as error:
        if not can_resume():
            raise
        raise JobStopped(f"{str(error) or 'interrupted'}. To resume: {this_command()}") from error
