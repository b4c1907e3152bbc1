"""Parts of a training that are neither a build nor steps: shown as they go on, and stopped when asked to."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import JobStopped, ShouldStop

_REPORT_SECONDS = 5.0


def watched(
    what: str, on_event: OnEvent, should_stop: ShouldStop, clock: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """A function to call with (done, total): it shows the stage `what` every 5 s.

    It raises JobStopped where `should_stop()` is true: what was done of the stage is done again.
    """
    on_event(StatusMessage(what))
    last = clock()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if should_stop():
            raise JobStopped(f"stopped while {what}: {done:,} of {total:,} were done, which are done again")
        if clock() - last >= _REPORT_SECONDS:
            last = clock()
            on_event(StatusMessage(f"{what}, {done:,} of {total:,}"))

    return progress
