"""Displays of a job's events, on standard error: a live line on a terminal, a plain log elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from pipelines.progress.events import Event, OnEvent, Planning, PlanReady, Progress, ShardDone, StatusMessage

if TYPE_CHECKING:
    from rich.progress import TaskID

_LOG_SECONDS = 10.0
_SHARD_LOG_SECONDS = 1.0


@contextlib.contextmanager
def progress_display(*, quiet: bool = False, stream: TextIO | None = None) -> Iterator[OnEvent]:
    """A function that shows events: nothing when `quiet`, live on a terminal, else log lines."""
    stream = stream or sys.stderr
    if quiet:
        yield lambda _: None
    elif stream.isatty():
        with LiveDisplay(stream) as live:
            yield live
    else:
        yield LogDisplay(stream)


def describe_plan(plan: PlanReady) -> list[str]:
    """The plan in lines for people."""
    lines = [f"{plan.inputs:,} inputs in {plan.shards:,} shards, {_counted(plan.workers, 'worker')}"]
    if plan.duplicates:
        lines.append(f"{plan.duplicates:,} inputs are byte-identical to another and will be encoded once")
    if plan.ignored:
        kinds = ", ".join(f"{name} {count:,}" for name, count in sorted(plan.ignored.items()))
        lines.append(f"ignored {_counted(sum(plan.ignored.values()), 'file')} that are no images: {kinds}")
    if plan.finished_shards:
        lines.append(f"resuming: {plan.finished_shards:,} of {plan.shards:,} shards are finished")
    return lines


def describe_progress(progress: Progress) -> str:
    """Progress as one line for people."""
    parts = [
        f"{progress.rows_done:,}/{progress.rows:,} images",
        f"{progress.images_per_second:.1f} images/s",
        f"shards {progress.shards_done:,}/{progress.shards:,}",
        f"failed {progress.failed:,}",
    ]
    if progress.seconds_left is not None:
        parts.append(f"{_duration(progress.seconds_left)} left")
    if progress.bottleneck is not None:
        parts.append(f"bottleneck {progress.bottleneck}")
    return ", ".join(parts)


class LogDisplay:
    """Plain lines: phases, a line at the end of a shard, else one about every ten seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._last = -_LOG_SECONDS

    def __call__(self, event: Event) -> None:
        match event:
            case Planning(inputs):
                self._write_seldom(_LOG_SECONDS, f"planning: {inputs:,} inputs so far")
            case PlanReady():
                for line in describe_plan(event):
                    self._write(line)
            case Progress():
                self._write_seldom(_LOG_SECONDS, describe_progress(event))
            case ShardDone(progress=progress):
                self._write_seldom(_SHARD_LOG_SECONDS, describe_progress(progress))
            case StatusMessage(text):
                self._write(text)

    def _write_seldom(self, seconds: float, line: str) -> None:
        if self._clock() - self._last >= seconds:
            self._last = self._clock()
            self._write(line)

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveDisplay:
    """A bar that is drawn in place. A context manager: leaving it puts the terminal right."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[line]}"),
            console=Console(file=stream),
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> LiveDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case Planning(inputs):
                self._show("planning", f"{inputs:,} inputs", None, 0)
            case PlanReady():
                for line in describe_plan(event):
                    self._bar.console.print(line, highlight=False, markup=False)
            case Progress() | ShardDone():
                progress = event.progress if isinstance(event, ShardDone) else event
                self._show("indexing", describe_progress(progress), progress.rows, progress.rows_done)
            case StatusMessage(text):
                self._show(text, "", None, 0)

    def _show(self, name: str, line: str, total: int | None, done: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task(name, total=total, line=line)
        self._bar.update(self._task, description=name, total=total, completed=done, line=line)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
