"""Reports the progress of one stage of a training run, and stops it on request."""

from __future__ import annotations

from collections.abc import Callable

from pipelines.progress.events import OnEvent, Progress
from pipelines.progress.stopping import JobStopped, ShouldStop


def watched(activity: str, on_event: OnEvent, should_stop: ShouldStop) -> Callable[[int, int], None]:
    """A callback `(done, total)` that reports the progress of `activity`.

    It raises JobStopped once `should_stop()` returns True. A stopped stage starts again from its beginning.
    """

    def progress(done: int, total: int) -> None:
        if should_stop():
            raise JobStopped(f"stopped while {activity}: {done:,} of {total:,} were done; they will be done again")
        on_event(Progress(activity, done, total))

    return progress
