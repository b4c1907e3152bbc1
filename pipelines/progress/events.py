"""Events that a job reports while it runs, and stopping a job early."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

from edje_index.progress import OnProgress, ShardProgress
from storage_formats.errors import EdjeError

Bottleneck = Literal["read", "decode", "model", "write"]
# A worker is always in one of these stages. Each stage maps to the bottleneck of a
# build whose workers spend most of their time in the stage. In the stage "wait", a
# worker waits for images, so the bottleneck is decoding or reading.
_STAGES: dict[str, Bottleneck] = {"wait": "decode", "encode": "model", "write": "write"}
# exit code of a program that Ctrl-C ends
INTERRUPTED = 128 + signal.SIGINT
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class StatusMessage:
    """One line of text for the user, for example about the next step of a job.

    Attributes:
        is_warning: True if the text reports a problem, for example a lost node.
    """

    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class PlanReady:
    """The plan of a job, reported as soon as the amount of work is known.

    Attributes:
        finished_shards: number of shards that earlier runs finished.
        workers: number of worker processes; None if the engine decides.
        duplicates: number of inputs that are byte-identical to an earlier input.
        ignored: number of files in the sources that are not inputs, by file extension.
    """

    inputs: int
    shards: int
    finished_shards: int = 0
    workers: int | None = None
    duplicates: int = 0
    ignored: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """The progress of one activity.

    Attributes:
        activity: name of the activity, for example "indexing".
        done: number of finished units of work, for example rows.
        total: number of all units of work; None if it is unknown.
        shards: number of shards of the job; None if the job does not process shards.
        finished_shards: number of finished shards, including those that earlier runs
            finished.
        bottleneck: what limits the speed of this run, according to the stage in which
            its workers spent the most time; None if no times are known yet.
        busy: see `busy_shares`.
        finished_shard: the shard that was just finished; None if the event reports
            something else.
    """

    activity: str
    done: int
    total: int | None = None
    shards: int | None = None
    finished_shards: int = 0
    failed: int = 0
    bottleneck: Bottleneck | None = None
    busy: Mapping[str, float] = field(default_factory=dict)
    finished_shard: ShardProgress | None = None


Event = StatusMessage | PlanReady | Progress
OnEvent = Callable[[Event], None]
"""Function that a job calls with each event."""
ShouldStop = Callable[[], bool]
"""Function that a job calls often. Once the function returns True, the job stops at
the next safe point.
"""


def ignore(event: Event) -> None:
    """Do nothing. This is the default value of `on_event`."""


def never() -> bool:
    """Return False. This is the default value of `should_stop`."""
    return False


def progress_callback(on_event: OnEvent) -> OnProgress:
    """Return a callback (activity, done, total) that passes `Progress` events to
    `on_event`.
    """
    return lambda activity, done, total: on_event(Progress(activity, done, total))


def bottleneck(stage_seconds: Mapping[str, float]) -> Bottleneck | None:
    """Return what limits a job whose workers spent `stage_seconds` in their stages, or
    None if no stage took any time.
    """
    seconds = Counter(stage_seconds)
    slowest = max(_STAGES, key=lambda stage: seconds[stage])
    if slowest == "wait" and seconds["read"] > seconds["decode"]:
        return "read"
    return _STAGES[slowest] if seconds[slowest] > 0 else None


def busy_shares(stage_seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the time, 0 to 1, in which "helpers" read and decoded
    images, and in which "model" ran. Return an empty dict if the times are unknown.
    """
    seconds = Counter(stage_seconds)
    elapsed = sum(seconds[stage] for stage in _STAGES)
    if not elapsed or not seconds["helpers"]:
        return {}
    prepared = seconds["read"] + seconds["decode"]
    return {
        "helpers": min(1.0, prepared / seconds["helpers"]),
        "model": seconds["encode"] / elapsed,
    }


class ShardMeter:
    """Computes the `Progress` of a job from the latest progress of each shard."""

    def __init__(
        self,
        activity: str,
        rows: int,
        shards: int,
    ) -> None:
        self._activity = activity
        self._rows = rows
        self._shards = shards
        # the numbers of each unfinished shard, and the sums over all shards
        self._running: dict[int, Counter[str]] = {}
        self._total = Counter[str]()
        self._finished: set[int] = set()

    def update(
        self,
        shard: ShardProgress,
        *,
        is_final: bool = False,
    ) -> Progress:
        """Record the progress of a shard, and return the progress of the job.

        Args:
            shard: the latest progress of a shard, which replaces its earlier progress.
                If the shard is already finished, `shard` is ignored, because reports of
                a worker may arrive late.
            is_final: True if the shard is finished.
        """
        if shard.shard not in self._finished:
            self._total.subtract(self._running.pop(shard.shard, ()))
            numbers = Counter(done=shard.done, failed=shard.failed)
            numbers.update(shard.stage_seconds)
            self._total.update(numbers)
            if is_final:
                self._finished.add(shard.shard)
            else:
                self._running[shard.shard] = numbers
        return Progress(
            self._activity,
            self._total["done"],
            self._rows,
            self._shards,
            len(self._finished),
            self._total["failed"],
            bottleneck(self._total),
            busy_shares(self._total),
            shard if is_final else None,
        )


class JobStopped(EdjeError):
    """The job stopped early, on request or because of an error. Finished work is kept.

    Examples:
        >>> from edje_index import JobStopped, build_index
        >>> try:
        ...     build_index(
        ...         "photos",
        ...         "new.edje",
        ...         "model",
        ...         engine="inline",
        ...         should_stop=lambda: True,
        ...     )
        ... except JobStopped:
        ...     print("stopped")
        stopped
    """


def is_stop_request(error: BaseException) -> bool:
    """Return True if a job ended with `error` because its stop was requested, and
    not because of another error.
    """
    if isinstance(error, JobStopped):
        return error.__cause__ is None or is_stop_request(error.__cause__)
    return isinstance(error, KeyboardInterrupt)


def stop_at_events(
    on_event: OnEvent,
    should_stop: ShouldStop,
    message: str,
) -> OnEvent:
    """Return a callback that passes each event to `on_event`, for a job that can stop
    at each of its events.

    Once `should_stop()` returns True, the callback raises JobStopped with `message`.
    """

    def report(event: Event) -> None:
        on_event(event)
        if should_stop():
            raise JobStopped(message)

    return report


@contextlib.contextmanager
def stop_on_signals() -> Iterator[ShouldStop]:
    """Yield a function that returns True after one of the signals SIGINT, SIGTERM and
    SIGHUP.

    The second signal raises KeyboardInterrupt. The third signal ends the process at
    once. If the first signal was SIGINT, the JobStopped of the stopped job gets the
    exit code `INTERRUPTED`.
    """
    received: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            # os.write is used instead of print. The signal may have interrupted a
            # print, and a second print inside the first would fail.
            name = signal.Signals(number).name
            os.write(2, f"{name}: stopping after the current batches\n".encode())
        elif len(received) == 2:
            raise KeyboardInterrupt
        else:
            os._exit(1)

    previous = {}
    # Python lets only the main thread set signal handlers.
    if threading.current_thread() is threading.main_thread():
        # Signals that were ignored before (by nohup, for example) stay ignored.
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    except JobStopped as error:
        if received[:1] == [signal.SIGINT] and is_stop_request(error):
            error.exit_code = INTERRUPTED
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
