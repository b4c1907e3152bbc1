"""Writes the events of a job to a log file with one JSON object per line. docs/build.md describes the fields."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from edje_index.images.remote.urls import without_credentials
from pipelines.progress.events import LEVELS, Event, FinishedShard, Level, OnEvent, PlanReady, Progress, StatusMessage
from pipelines.progress.stopping import is_stop_request
from storage_formats.errors import EdjeError, UsageError

_PROGRESS_SECONDS = 10.0

FailuresOfShard = Callable[[int], Iterable[dict[str, Any]]]
"""A function that returns the failed rows of a shard: row_id, uri, reason and detail."""


@contextlib.contextmanager
def event_log(
    path: Path, command: str, failures: FailuresOfShard = lambda shard: (), *, level: Level = "info"
) -> Iterator[OnEvent]:
    """Yield a callback that appends events to the file at `path`.

    The first line of a run names the command, and the last line says how the run ended, unless `level` leaves
    these lines out.

    Args:
        path: file of the log. Existing lines are kept.
        command: command line of the job. Passwords in its URLs are left out.
        failures: function that returns the failed rows of a finished shard.
        level: lowest level of the events to write.

    Raises:
        UsageError: the file cannot be opened.
    """
    try:
        file = path.open("ab", buffering=0)  # a buffer that cannot be flushed would fail the job at the end
    except OSError as error:
        problem = f"cannot write the log {path}: {error.strerror}; choose another file"
        raise UsageError(problem, parameter="log") from error
    started = time.monotonic()
    with file:
        log = EventLog(file, failures, level=level)
        log.write("start", command=without_credentials(command))
        try:
            yield log
        except BaseException as error:
            stopped = is_stop_request(error)
            log.write(
                "end",
                "warning" if stopped else "error",
                status="stopped" if stopped else "failed",
                seconds=_elapsed(started),
                error=str(error) or type(error).__name__,
            )
            raise
        log.write("end", status="finished", seconds=_elapsed(started))


class EventLog:
    """Callback that writes events to `file`. If the file cannot be written, the job goes on without the log."""

    def __init__(
        self,
        file: FileIO,
        failures: FailuresOfShard = lambda shard: (),
        *,
        clock: Callable[[], float] = time.monotonic,
        level: Level = "info",
    ) -> None:
        self._file: FileIO | None = file
        self._failures = failures
        self._clock = clock
        self._levels = LEVELS[LEVELS.index(level) :]
        self._progress: tuple[str, float] = ("", 0.0)  # the activity of the last line on progress, and its time

    def __call__(self, event: Event) -> None:
        """Write the lines of `event`.

        Progress has the level "info" at most every ten seconds, and when an activity ends. Otherwise its level is
        "debug".
        """
        match event:
            case StatusMessage(text, is_warning):
                self.write("message", "warning" if is_warning else "info", text=text)
            case PlanReady():
                self.write("plan", **asdict(event))
            case Progress():
                if event.finished_shard is not None:
                    self._write_shard(event.activity, event.finished_shard)
                self._write_progress(event, "info" if self._is_due(event) else "debug")

    def write(self, event: str, level: Level = "info", **fields: Any) -> None:
        """Write one line, unless `level` is below the level of the log."""
        if self._file is None or level not in self._levels:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "level": level, "event": event, **fields}
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            print(f"cannot write the log {self._file.name}: {error.strerror}; the job goes on", file=sys.stderr)
            self._file = None

    def _write_shard(self, activity: str, shard: FinishedShard) -> None:
        seconds = {stage: round(value, 3) for stage, value in shard.stage_seconds.items()}
        self.write("shard", activity=activity, **{**asdict(shard), "stage_seconds": seconds})
        if not shard.failed:
            return
        try:
            for row in self._failures(shard.shard):
                self.write("failed", "warning", shard=shard.shard, **row)
        except (EdjeError, OSError) as error:
            self.write("message", "warning", text=f"the failed rows of shard {shard.shard} cannot be listed: {error}")

    def _is_due(self, event: Progress) -> bool:
        activity, written_at = self._progress
        late = self._clock() - written_at >= _PROGRESS_SECONDS
        return activity != event.activity or late or event.done == event.total

    def _write_progress(self, event: Progress, level: Level) -> None:
        if level not in self._levels:
            return
        if level == "info":
            self._progress = (event.activity, self._clock())
        shards = None if event.shards is None else asdict(event.shards)
        self.write(
            "progress",
            level,
            activity=event.activity,
            done=event.done,
            total=event.total,
            shards=shards,
        )


def _elapsed(started: float) -> float:
    return round(time.monotonic() - started, 3)
