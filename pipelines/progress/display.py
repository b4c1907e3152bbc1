"""Shows the events of a job on standard error, and writes them to the file of `--log`.

docs/build.md describes the lines of the file.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeAlias

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

Log: TypeAlias = Callable[..., None]
"""Writes one line to a log: the name of an event, its level, and further members."""


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
        log: Log,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich import progress
        from rich.console import Console

        self._log = log
        self._is_live = stream.isatty()
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[line]}", markup=False),
            console=Console(
                file=stream,
                quiet=quiet,
                soft_wrap=True,
                markup=False,
                emoji=False,
                highlight=False,
            ),
            disable=quiet or not self._is_live,
            refresh_per_second=4,
            speed_estimate_period=_RATE_SECONDS,
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=clock,
        )
        self._clock = clock
        self._shown_at = 0.0

    def __call__(self, event: Event) -> None:
        """Show and log `event`. Progress is logged every ten seconds, and at the
        beginning and end of an activity.
        """
        match event:
            case StatusMessage(text, is_warning):
                self._print(text)
                self._log("message", "warning" if is_warning else "info", text=text)
            case PlanReady():
                self._print(f"plan: {as_text(asdict(event))}")
                self._log("plan", **asdict(event))
            case Progress():
                self._show_progress(event)

    def _show_progress(self, event: Progress) -> None:
        members = asdict(event)
        if shard := members.pop("finished_shard"):
            self._log("shard", activity=event.activity, **shard)
        is_new = event.activity not in [task.description for task in self.bar.tasks]
        if is_new:
            for old in self.bar.task_ids:
                self.bar.remove_task(old)
            # The work of earlier runs must not count in the speed of a resumed job. The
            # bar therefore starts at the amount of work that the first event reports as
            # done.
            self.bar.add_task(event.activity, completed=event.done, line="")
        (task,) = self.bar.tasks
        self.bar.update(task.id, total=event.total, completed=event.done)
        line = f"{event.done:,}"
        if event.total is not None:
            line += f"/{event.total:,}"
        if task.speed is not None:
            line += f", {task.speed:,.1f}/s"
        if left := task.time_remaining:
            line += f", left {duration(left)}"
        if event.shards is not None:
            line += f", shards {event.finished_shards:,}/{event.shards:,}"
        if event.failed:
            line += f", failed {event.failed:,}"
        if event.bottleneck is not None:
            line += f", bottleneck {event.bottleneck}"
        if event.busy:
            line += f", busy ({as_text(event.busy, 'busy')})"
        self.bar.update(task.id, line=line)
        is_due = self._clock() - self._shown_at >= _LINE_SECONDS
        if is_new or is_due or event.done == event.total:
            self._shown_at = self._clock()
            if not self._is_live:
                self._print(f"{event.activity}: {line}")
            self._log("progress", **members)

    def _print(self, line: str) -> None:
        self.bar.console.print(printable(line))


@contextlib.contextmanager
def log_file(path: Path, command: str) -> Iterator[Log]:
    """Yield a function that appends one JSON object per line to the file at `path`. If
    the file cannot be written, the job goes on without the log.

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

    def log(event: str, level: str = "info", **members: Any) -> None:
        if file.closed:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "level": level, "event": event, **members}
        try:
            file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            file.close()
            problem = f"cannot write the log {path}: {error.strerror}; the job goes on"
            print(problem, file=sys.stderr)

    started = time.monotonic()
    level = "info"
    end = {"status": "finished"}
    with file:
        log("start", command=without_credentials(command))
        try:
            yield log
        except BaseException as error:
            is_stop = is_stop_request(error)
            level = "warning" if is_stop else "error"
            end["status"] = "stopped" if is_stop else "failed"
            end["error"] = str(error) or type(error).__name__
            raise
        finally:
            log("end", level, **end, seconds=round(time.monotonic() - started, 3))
