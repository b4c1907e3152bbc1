"""Prints the result of a command as text or JSON, and shows the progress of a job."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from pipelines.progress.events import Event, Level, OnEvent
from pipelines.progress.stopping import JobStopped, ShouldStop
from pipelines.progress.wording import printable
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.object_store import IndexLocation

LOG_LEVEL_KEY = "pipelines.cli.log_level"
"""Key of the value of `--log-level` in `click.Context.meta`."""


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
def naming_max_failed() -> Iterator[None]:
    """Context manager that names the option `--max-failed` if too many inputs failed."""
    from pipelines.jobs.failed_inputs import FailedInputsError

    try:
        yield
    except FailedInputsError as error:
        if not error.over_limit:
            raise
        raise EdjeError(
            f"{error.problem}. To continue without the failed inputs, run: {this_command()} --max-failed 1"
        ) from error


@contextlib.contextmanager
def running_job(
    *,
    quiet: bool,
    can_resume: Callable[[], bool] = lambda: True,
    log: Path | None = None,
    root: Callable[[], Path] | None = None,
    metrics: Path | None = None,
    index: IndexLocation = "",
) -> Iterator[tuple[OnEvent, ShouldStop]]:
    """Yield two callbacks for a job: `on_event` shows progress, and `should_stop` returns True after a signal to stop.

    If the job stops early and `can_resume()` returns True, the error message says how to resume the job.

    Args:
        quiet: True to show no progress.
        can_resume: function that returns True if a stopped job can be resumed.
        log: file to append the events to; None writes no log.
        root: function that returns the directory of the index that the job writes; the log names the failed inputs of
            this index.
        metrics: file of metrics for Prometheus; None writes no metrics.
        index: path or URL of the index, which the metrics name.
    """
    # Standard output carries only the result, so text that libraries print goes to standard error.
    from pipelines.progress.display import progress_display
    from pipelines.progress.stopping import stop_on_signals

    try:
        with (
            contextlib.redirect_stdout(sys.stderr),
            stop_on_signals() as should_stop,
            progress_display(quiet=quiet) as show,
            _recording(show, log, root, metrics, index) as on_event,
        ):
            yield on_event, should_stop
    except (JobStopped, KeyboardInterrupt) as error:
        if not can_resume():
            raise
        raise JobStopped(f"{str(error) or 'interrupted'}. To resume: {this_command()}") from error


@contextlib.contextmanager
def _recording(
    show: OnEvent, log: Path | None, root: Callable[[], Path] | None, metrics: Path | None, index: IndexLocation
) -> Iterator[OnEvent]:
    """Yield a callback that passes events to `show`, and to the files `log` and `metrics` if they are not None."""
    receivers = [show]
    level = _log_level(log)
    with contextlib.ExitStack() as stack:
        if log is not None:
            from pipelines.cli.failed_rows import failed_rows_of_shard
            from pipelines.progress.event_log import event_log

            failures = (lambda shard: failed_rows_of_shard(root(), shard)) if root is not None else (lambda shard: ())
            receivers.append(stack.enter_context(event_log(log, this_command(), failures, level=level)))
        if metrics is not None:
            from pipelines.progress.metrics_file import metrics_file

            command = click.get_current_context().info_name or ""
            receivers.append(stack.enter_context(metrics_file(metrics, command, str(index))))

        def on_event(event: Event) -> None:
            for receiver in receivers:
                receiver(event)

        yield on_event


def _log_level(log: Path | None) -> Level:
    context = click.get_current_context(silent=True)
    level: Level | None = None if context is None else context.meta.get(LOG_LEVEL_KEY)
    if level is not None and log is None:
        raise UsageError("--log-level selects the events of a log; name the file of the log with --log")
    return level or "info"
