"""The inline engine: one worker in this process, one task at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from pipelines.engines.base import Notice, Outcome, Task, WorkerFactory, build_worker, run_task

_POLL_SECONDS = 0.2


class InlineEngine:
    """Engine that runs tasks in the calling thread. See `pipelines.engines.base.Engine`."""

    name = "inline"

    def run(
        self,
        make_worker: WorkerFactory,
        tasks: Iterable[Task | None],
        *,
        on_progress: Callable[[Any], None],
        should_stop: Callable[[], bool],
    ) -> Generator[Outcome | Notice, None, None]:
        worker = build_worker(make_worker)
        for task in tasks:
            if should_stop():
                return
            if task is None:
                time.sleep(_POLL_SECONDS)
                continue
            outcome = run_task(worker, task, on_progress, should_stop)
            if outcome is None:
                return
            yield outcome
