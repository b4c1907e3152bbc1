"""Shows the events of a job on standard error: a live line on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from pipelines.progress.events import Event, OnEvent, PlanReady, Progress, StatusMessage
from pipelines.progress.wording import counted, duration, printable

if TYPE_CHECKING:
    from rich.progress import Task

_RATE_SECONDS = 120.0  # rates are averages over this time; it has to span several batches of a slow model
_LOG_SECONDS = 10.0
_SHARD_LOG_SECONDS = 1.0


@contextlib.contextmanager
def progress_display(*, quiet: bool = False, stream: TextIO | None = None) -> Iterator[OnEvent]:
    """Yield a callback that shows events on `stream`, by default standard error.

    If `quiet` is True, the callback does nothing.
    """
    stream = stream or sys.stderr
    if quiet:
        yield lambda _: None
    elif stream.isatty():
        with LiveDisplay(stream) as live:
            yield live
    else:
        yield LogDisplay(stream)


def describe_plan(plan: PlanReady) -> list[str]:
    """Return lines of text that describe a plan."""
    workers = "" if plan.workers is None else f", {counted(plan.workers, 'worker')}"
    lines = [f"{counted(plan.inputs, 'input')} in {counted(plan.shards, 'shard')}{workers}"]
    if plan.duplicates:
        lines.append(f"{counted(plan.duplicates, 'duplicate')} of earlier inputs will not be encoded again")
    if plan.ignored:
        kinds = ", ".join(f"{name} {count:,}" for name, count in sorted(plan.ignored.items()))
        lines.append(f"ignored {counted(sum(plan.ignored.values()), 'other file')}: {kinds}")
    if plan.finished_shards:
        lines.append(f"resuming: {plan.finished_shards:,} of {counted(plan.shards, 'shard')} finished")
    return lines


def describe_progress(progress: Progress, *, speed: float | None = None, seconds_left: float | None = None) -> str:
    """Return one line of text on the progress, without the name of the activity.

    `speed` is the number of units of work per second.
    """
    parts = [f"{progress.done:,}" if progress.total is None else f"{progress.done:,}/{progress.total:,}"]
    if speed is not None:
        parts.append(f"{speed:,.1f}/s")
    if seconds_left:
        parts.append(f"{duration(seconds_left)} left")
    if progress.shards is not None:
        parts.append(f"shards {progress.shards.finished:,}/{progress.shards.total:,}")
        if progress.shards.failed_rows:
            parts.append(f"{progress.shards.failed_rows:,} failed")
        if progress.shards.bottleneck is not None:
            parts.append(f"bottleneck {progress.shards.bottleneck}")
    return ", ".join(parts)


class _Tracker:
    """Measures the speed of the current activity with `rich`, and estimates the remaining time."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        from rich import progress
        from rich.console import Console

        self.bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[line]}", markup=False),
            console=Console(file=stream),
            refresh_per_second=4,
            speed_estimate_period=_RATE_SECONDS,
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=clock,
        )

    def update(self, event: Progress) -> str:
        """Record `event`, and return the line of text that describes it."""
        task = self._task_of(event)
        self.bar.update(task.id, total=event.total, completed=event.done)
        line = describe_progress(event, speed=task.speed, seconds_left=task.time_remaining)
        self.bar.update(task.id, line=line)
        return line

    def _task_of(self, event: Progress) -> Task:
        """Return the `rich` task of the activity. The speed is measured from the first event of the activity."""
        for task in self.bar.tasks:
            if task.description == event.activity:
                return task
            self.bar.remove_task(task.id)
        self.bar.add_task(event.activity, total=event.total, completed=event.done, line="")
        return self.bar.tasks[0]


class _Display(ABC):
    def __call__(self, event: Event) -> None:
        match event:
            case StatusMessage(text):
                self._print(text)
            case PlanReady():
                for line in describe_plan(event):
                    self._print(line)
            case Progress():
                self._show_progress(event)

    @abstractmethod
    def _print(self, line: str) -> None: ...

    @abstractmethod
    def _show_progress(self, event: Progress) -> None: ...


class LogDisplay(_Display):
    """Prints events as plain lines, and progress every ten seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._tracker = _Tracker(stream, clock)
        self._printed = (-_LOG_SECONDS, "")  # when the last progress was printed, and its line
        self._finished_shards = 0

    def _show_progress(self, event: Progress) -> None:
        line = f"{event.activity}: {self._tracker.update(event)}"
        printed_at, printed_line = self._printed
        if self._clock() - printed_at >= self._interval(event) and line != printed_line:
            self._finished_shards = event.shards.finished if event.shards else 0
            self._printed = (self._clock(), line)
            self._print(line)

    def _interval(self, event: Progress) -> float:
        """Return the minimum number of seconds between two printed lines of progress."""
        shards = event.shards
        if event.done == event.total and (shards is None or shards.finished == shards.total):
            return 0.0
        return _SHARD_LOG_SECONDS if shards and shards.finished > self._finished_shards else _LOG_SECONDS

    def _print(self, line: str) -> None:
        print(printable(line), file=self._stream, flush=True)


class LiveDisplay(_Display):
    """Context manager that redraws the line of the current activity, and prints other lines above this line."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracker = _Tracker(stream, clock)

    def __enter__(self) -> LiveDisplay:
        self._tracker.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._tracker.bar.stop()

    def _show_progress(self, event: Progress) -> None:
        self._tracker.update(event)

    def _print(self, line: str) -> None:
        self._tracker.bar.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
