"""The inline engine: one worker in this process, one task after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

from pipelines.engines.base import (
    Outcome,
    Task,
    TaskDone,
    TaskFailure,
    TaskInterrupted,
    WorkerFactory,
    describe_error,
    describe_trace,
)
from storage_formats.errors import EdjeError


class InlineEngine:
    """Runs tasks in the calling thread; see `pipelines.engines.base.Engine`."""

    name = "inline"

    def run(
        self,
        make_worker: WorkerFactory,
        tasks: Iterable[Task],
        *,
        on_progress: Callable[[Any], None],
        should_stop: Callable[[], bool],
    ) -> Generator[Outcome, None, None]:
        try:
            worker = make_worker()
        except Exception as error:
            raise EdjeError(f"a worker could not start: {describe_error(error)}") from error
        for task in tasks:
            if should_stop():
                return
            try:
                outcome: Outcome = TaskDone(task, worker(task, on_progress, should_stop))
            except TaskInterrupted:
                return
            except Exception as error:
                outcome = TaskFailure(task, describe_error(error), describe_trace(error))
            yield outcome
