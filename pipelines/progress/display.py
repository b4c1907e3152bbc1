"""Shows the events of a job on standard error, and logs them with `logging`.

The logger is `edje_index.job`. Its records have the name of the event as their message,
and the attribute `fields`. docs/build.md describes the fields.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TextIO

from pipelines.progress.events import (
    Event,
    PlanReady,
    Progress,
    StatusMessage,
    is_stop_request,
)
from pipelines.progress.wording import as_text, duration, printable
from storage_formats.errors import UsageError
from storage_formats.remote.urls import without_credentials

# Speeds are averages over this time, which has to span several batches of a slow model.
_RATE_SECONDS = 120.0
# minimum time between two plain lines, or two log records, of the same activity
_LINE_SECONDS = 10.0

_LOGGER = logging.getLogger("edje_index.job")
_LOGGER.addHandler(logging.NullHandler())


class Display:
    """Callback that shows events on a stream and logs them. If `quiet` is True, it only
    logs.

    On a terminal, inside `with display.bar`, the display redraws one line that shows
    the current activity. On any other stream, the display prints plain lines.

    Attributes:
        bar: progress bar that shows the line on a terminal, and measures speeds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich import progress
        from rich.console import Console

        self._console = Console(
            file=stream,
            quiet=quiet,
            soft_wrap=True,
            markup=False,
            emoji=False,
            highlight=False,
        )
        self._is_live = stream.isatty()
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[line]}", markup=False),
            console=self._console,
            disable=quiet or not self._is_live,
            refresh_per_second=4,
            speed_estimate_period=_RATE_SECONDS,
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=clock,
        )
        self._clock = clock
        self._activity = ""
        self._shown_at = 0.0

    def __call__(self, event: Event) -> None:
        """Show and log `event`. Progress is logged every ten seconds, and at the
        beginning and end of an activity.
        """
        match event:
            case StatusMessage(text, is_warning):
                self._print(text)
                level = logging.WARNING if is_warning else logging.INFO
                _log("message", level, text=text)
            case PlanReady():
                self._print(f"plan: {as_text(asdict(event))}")
                _log("plan", **asdict(event))
            case Progress():
                self._show_progress(event)

    def _show_progress(self, event: Progress) -> None:
        if (shard := event.finished_shard) is not None:
            seconds = {
                stage: round(value, 3) for stage, value in shard.stage_seconds.items()
            }
            counts = {"shard": shard.shard, "rows": shard.done, "failed": shard.failed}
            _log("shard", activity=event.activity, **counts, stage_seconds=seconds)
        is_new = event.activity != self._activity
        if is_new:
            for old in self.bar.task_ids:
                self.bar.remove_task(old)
            # The work of earlier runs must not count in the speed of a resumed job. The
            # bar therefore starts at the amount of work that the first event reports as
            # done.
            self.bar.add_task(event.activity, completed=event.done, line="")
        (task,) = self.bar.tasks
        self.bar.update(task.id, total=event.total, completed=event.done)
        line = describe_progress(event, task.speed, task.time_remaining)
        self.bar.update(task.id, line=line)
        is_due = self._clock() - self._shown_at >= _LINE_SECONDS
        if is_new or is_due or event.done == event.total:
            self._activity = event.activity
            self._shown_at = self._clock()
            if not self._is_live:
                self._print(f"{event.activity}: {line}")
            fields = asdict(event)
            del fields["finished_shard"]
            _log("progress", **fields)

    def _print(self, line: str) -> None:
        self._console.print(printable(line))


def describe_progress(
    progress: Progress,
    speed: float | None,
    seconds_left: float | None,
) -> str:
    """Return one line of text on the progress, without the name of the activity.

    `speed` is the number of units of work per second.
    """
    done = f"{progress.done:,}"
    if progress.total is not None:
        done += f"/{progress.total:,}"
    if speed is not None:
        done += f", {speed:,.1f}/s"
    shards = None
    if progress.shards is not None:
        shards = f"{progress.finished_shards:,}/{progress.shards:,}"
    figures = {
        "left": duration(seconds_left) if seconds_left else None,
        "shards": shards,
        "failed": progress.failed or None,
        "bottleneck": progress.bottleneck,
        "busy": progress.busy,
    }
    return ", ".join(filter(None, [done, as_text(figures)]))


@contextlib.contextmanager
def log_file(path: Path, command: str) -> Iterator[None]:
    """Append the log records of the context to the file at `path`, one JSON object per
    line.

    The first line contains the command line `command`, without the passwords in its
    URLs. The last line says how the job ended.
    """
    try:
        # The file has no buffer. A buffer would be written when the file is closed, and
        # an error at that moment would make a finished job fail.
        file = path.open("ab", buffering=0)
    except OSError as error:
        problem = f"cannot write the log {path}: {error.strerror}; choose another file"
        raise UsageError(problem, parameter="log") from error
    started = time.monotonic()
    level_before = _LOGGER.level
    level = logging.INFO
    end = {"status": "finished"}
    with file:
        handler = _JsonLines(file)
        _LOGGER.addHandler(handler)
        _LOGGER.setLevel(logging.INFO)
        _log("start", command=without_credentials(command))
        try:
            yield
        except BaseException as error:
            is_stop = is_stop_request(error)
            level = logging.WARNING if is_stop else logging.ERROR
            end["status"] = "stopped" if is_stop else "failed"
            end["error"] = str(error) or type(error).__name__
            raise
        finally:
            seconds = round(time.monotonic() - started, 3)
            _log("end", level, **end, seconds=seconds)
            _LOGGER.removeHandler(handler)
            _LOGGER.setLevel(level_before)


class _JsonLines(logging.Handler):
    """Writes records as JSON objects. If the file cannot be written, the job goes
    on without the log.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file: IO[bytes] | None = file

    def emit(self, record: logging.LogRecord) -> None:
        if self._file is None:
            return
        when = datetime.fromtimestamp(record.created, UTC).isoformat(
            timespec="milliseconds"
        )
        line = {
            "time": when,
            "level": record.levelname.lower(),
            "event": record.msg,
            **vars(record)["fields"],
        }
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            print(
                f"cannot write the log {self._file.name}: {error.strerror}; the job"
                " goes on",
                file=sys.stderr,
            )
            self._file = None


def _log(
    event: str,
    level: int = logging.INFO,
    **fields: Any,
) -> None:
    _LOGGER.log(level, event, extra={"fields": fields})
