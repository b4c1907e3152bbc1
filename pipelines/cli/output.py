"""Prints the result of a command as text or JSON, and shows the progress of a job."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import select
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from pipelines.progress.events import INTERRUPTED, JobStopped, OnEvent, ShouldStop
from pipelines.progress.wording import printable
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout
from storage_formats.remote.urls import IndexLocation

_Result = TypeVar("_Result")
LOG_KEY = "pipelines.cli.log"
"""Key of the value of `--log` in `click.Context.meta`."""


class _Standard(io.FileIO):
    """Standard output or standard error, which waits for a slow reader.

    Of standard output, the first error ends the command, and what follows is dropped.
    Of standard error, every error is ignored: no command fails for want of a reader of
    its messages.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_lost = descriptor == 2

    def write(self, data: Any, /) -> int:
        try:
            # None: the descriptor does not block, and its buffer is full
            while (count := super().write(data)) is None:
                select.select([], [self], [])
            return count
        except OSError as error:
            if not self._is_lost:
                self._is_lost = True
                if isinstance(error, BrokenPipeError):
                    raise
                raise EdjeError(
                    f"cannot write standard output: {error.strerror}; free some space,"
                    " or write to another place"
                ) from error
            return memoryview(data).nbytes


def open_standard_streams() -> None:
    """Replace standard output and standard error of this process by streams that
    escape what the terminal cannot show.

    A closed descriptor becomes /dev/null, else the next file of the index that is
    opened would receive the messages.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is None:
            # the lowest free descriptor
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            stream.flush()
        new = io.TextIOWrapper(
            io.BufferedWriter(_Standard(1 if name == "stdout" else 2)),
            encoding=getattr(stream, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, new)


def finite(value: Any) -> Any:
    """Return a JSON value with null in place of the numbers that are not finite, for
    which JSON has no notation.
    """
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: dict[str, Any]) -> None:
    """Print `value` as a JSON object on one line of standard output."""
    # times as text
    click.echo(json.dumps(finite(value), sort_keys=True, default=str))


def print_line(text: str) -> None:
    """Print `text` on standard output, with control characters escaped."""
    click.echo(printable(text))


def is_given(option: str) -> bool:
    """Return True if the flag `option` of the command is given: --json or --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(option))


def wants_json() -> bool:
    """Return True if the command prints JSON."""
    return is_given("--json")


def print_result(result: Any, *lines: str) -> None:
    """Print a dataclass or JSON object as JSON, or `lines` that describe it."""
    if wants_json():
        print_json(result if isinstance(result, dict) else asdict(result))
        return
    for line in lines:
        print_line(line)


def note(message: str) -> None:
    """Print `message` on standard error, with control characters escaped."""
    click.echo(printable(message), err=True)


def this_command() -> str:
    """Return the command line of this process as a user would type it."""
    return shlex.join(["edje-index", *sys.argv[1:]])


@contextlib.contextmanager
def running_job(
    *, resume: IndexLocation | bool = False, quiet: bool = False
) -> Iterator[tuple[OnEvent, ShouldStop]]:
    """Yield two callbacks for a job: `on_event` shows progress, and `should_stop`
    returns True after a signal to stop.

    With the option `--log`, the events are also written to the file that it names. If
    the job stops early and can be resumed, the error message says how.

    Args:
        resume: whether the same command resumes a stopped job. A job that changes an
            index gives the index: it can be resumed once the index has a journal.
    """
    from pipelines.progress.display import Display, log_file
    from pipelines.progress.events import stop_on_signals

    context = click.get_current_context(silent=True)
    log: Path | None = None if context is None else context.meta.get(LOG_KEY)
    display = Display(sys.stderr, quiet=quiet or is_given("--quiet"))
    try:
        with (
            # text that libraries print: standard output has only the result
            contextlib.redirect_stdout(sys.stderr),
            stop_on_signals() as should_stop,
            display.bar,
            contextlib.nullcontext() if log is None else log_file(log, this_command()),
        ):
            yield display, should_stop
    except (JobStopped, KeyboardInterrupt) as error:
        if isinstance(resume, Path):
            resume = Layout(resume).journal.exists()
        if not resume:
            raise
        stopped = JobStopped(
            f"{str(error) or 'interrupted'}. To resume: {this_command()}"
        )
        stopped.exit_code = getattr(error, "exit_code", INTERRUPTED)
        raise stopped from error


def run_job(
    job: Callable[..., _Result],
    *arguments: Any,
    resume: IndexLocation | bool = False,
    **options: Any,
) -> _Result:
    """Run a job as `running_job` does, and return its result. `job` takes `on_event`
    and `should_stop` beside `arguments` and `options`.
    """
    with running_job(resume=resume) as (on_event, should_stop):
        return job(*arguments, on_event=on_event, should_stop=should_stop, **options)


def run_steps(
    function: Callable[..., _Result],
    *arguments: Any,
    stopped: str,
    **options: Any,
) -> _Result:
    """Call a function of a library that reports its steps to `on_progress`, and return
    its result. After a signal to stop, it ends at its next step with the message
    `stopped`.
    """
    from pipelines.progress.events import progress_callback, stop_at_events

    with running_job() as (on_event, should_stop):
        on_progress = progress_callback(stop_at_events(on_event, should_stop, stopped))
        return function(*arguments, on_progress=on_progress, **options)
