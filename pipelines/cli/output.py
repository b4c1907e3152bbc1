"""Prints the result of a command as text or JSON, and shows the progress of a job."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import os
import select
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from pipelines.progress.events import INTERRUPTED, JobStopped
from pipelines.progress.wording import describe, printable
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import EdjeError

_Result = TypeVar("_Result")
LOG_KEY = "pipelines.cli.log"
"""Key of the value of `--log` in `click.Context.meta`."""
JSON = "--json"
"""Key of the value of `--json` in `click.Context.meta`."""
QUIET = "--quiet"
"""Key of the value of `--quiet` in `click.Context.meta`."""


class _Standard(io.FileIO):
    """Standard output or standard error, as a file that waits for a slow reader.

    The first error of standard output is raised and ends the command; later errors are
    ignored. All errors of standard error are ignored, so that a command does not fail
    only because nobody can read its messages.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        # True if errors are ignored: on standard error from the start, and on standard
        # output after the first error.
        self._is_lost = descriptor == 2

    def write(self, data: Any, /) -> int:
        try:
            # `write` returns None if the descriptor is non-blocking and its buffer is
            # full.
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
    escape characters that their encoding cannot represent.

    A standard stream that is closed becomes /dev/null. Otherwise, the next file that
    the process opens would get the descriptor of that stream, and messages would be
    written to that file, for example to a file of the index.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is None:
            # The system gives a new file the lowest free descriptor, which is the
            # descriptor of this closed stream.
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
    """Return a JSON value in which None replaces arrays, and NaN and infinity, because
    JSON cannot represent these numbers.
    """
    if getattr(value, "ndim", 0):
        return None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: dict[str, Any]) -> None:
    """Print `value` as a JSON object on one line of standard output."""
    # `default=str` turns values of other types, such as times and paths, into text.
    click.echo(json.dumps(finite(value), default=str))


def print_line(text: str) -> None:
    """Print `text` on standard output, with control characters escaped."""
    click.echo(printable(text))


def value_of(option: str) -> Any:
    """Return the value of an option of all commands: `JSON`, `QUIET` or `LOG_KEY`. None
    if it was not given.
    """
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(option)


def wants_json() -> bool:
    """Return True if the command prints JSON."""
    return value_of(JSON) is not None


def print_result(result: Any, lines: Iterable[str] = ()) -> None:
    """Print the result of a command, a dataclass or a JSON object. With --json, print
    it as JSON, and otherwise print `lines`, or all its members if there are no `lines`.
    """
    value = result if isinstance(result, dict) else asdict(result)
    if wants_json():
        print_json(value)
        return
    for line in list(lines) or list(describe(value)) or ["nothing to do"]:
        print_line(line)


def note(message: str) -> None:
    """Print `message` on standard error, with control characters escaped."""
    click.echo(printable(message), err=True)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user has named. Follow a symbolic link. Write to a device
    or a pipe itself, which must not be replaced by a file.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        write_bytes_atomic(Path(os.path.realpath(path)), data)


def this_command() -> str:
    """Return the command line of this process as a user would type it."""
    return shlex.join(["edje-index", *sys.argv[1:]])


def run_job(
    job: Callable[..., _Result],
    *arguments: Any,
    resume: bool = False,
    **options: Any,
) -> _Result:
    """Call `job`, show its progress, and return its result.

    Besides `arguments` and `options`, `job` gets those of the callbacks `on_event`,
    `should_stop`, `on_progress` and `say` that it takes. After a signal to stop,
    `should_stop` returns True, and `on_progress` raises JobStopped. If `job` takes
    neither, the signal ends it at once. With the option `--log FILE`, the events are
    also written to FILE. If the job stops early and can be resumed, the error message
    contains the command that resumes it.

    Args:
        resume: True if the same command resumes a stopped job.
    """
    from pipelines.progress.display import Display, log_file
    from pipelines.progress.events import (
        StatusMessage,
        never,
        progress_callback,
        stop_at_events,
        stop_on_signals,
    )

    names = inspect.signature(job).parameters
    stops = not {"should_stop", "on_progress"}.isdisjoint(names)
    try:
        with (
            # Standard output must contain nothing but the result, so text that
            # libraries print goes to standard error.
            contextlib.redirect_stdout(sys.stderr),
            (
                stop_on_signals() if stops else contextlib.nullcontext(never)
            ) as should_stop,
            # Without the option --log, the log is written to /dev/null.
            log_file(value_of(LOG_KEY) or Path(os.devnull), this_command()) as log,
        ):
            display = Display(sys.stderr, log, quiet=bool(value_of(QUIET)))
            stopping = stop_at_events(display, should_stop, "stopped before the end")
            callbacks = {
                "on_event": display,
                "should_stop": should_stop,
                "on_progress": progress_callback(stopping),
                "say": lambda text: display(StatusMessage(text)),
            }
            options |= {name: callbacks[name] for name in callbacks if name in names}
            with display.bar:
                return job(*arguments, **options)
    except (JobStopped, KeyboardInterrupt) as error:
        if not resume:
            raise
        stopped = JobStopped(
            f"{str(error) or 'interrupted'}. To resume: {this_command()}"
        )
        stopped.exit_code = getattr(error, "exit_code", INTERRUPTED)
        raise stopped from error
