"""Prints the result of a command as text or JSON, and shows the progress of a job."""

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


def print_json(value: dict[str, Any]) -> None:
    """Print `value` as a JSON object on one line of standard output."""
    click.echo(json.dumps(value, sort_keys=True))


def print_line(text: str) -> None:
    """Print `text` on standard output, with control characters escaped."""
    click.echo(printable(text))


def note(message: str) -> None:
    """Print `message` on standard error, with control characters escaped."""
    click.echo(printable(message), err=True)


def this_command() -> str:
    """Return the command line of this process as a user would type it."""
    return shlex.join(["edje-index", *sys.argv[1:]])


@contextlib.contextmanager
def running_job(*, quiet: bool, can_resume: Callable[[], bool] = lambda: True) -> Iterator[tuple[OnEvent, ShouldStop]]:
    """Yield two callbacks for a job: `on_event` shows progress, and `should_stop` returns True after a signal to stop.

    If the job stops early and `can_resume()` returns True, the error message says how to resume the job.
    """
    # Standard output carries only the result, so text that libraries print goes to standard error.
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
