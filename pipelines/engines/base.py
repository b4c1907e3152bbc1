"""The interface of execution engines. An engine takes tasks and yields one outcome per task.

Tasks must be safe to repeat: if a worker process dies, its task runs again on another worker.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from pipelines.collector import paused_collector
from storage_formats.errors import EdjeError

Task = Any
Worker = Callable[[Task, Callable[[Any], None], Callable[[], bool]], Any]
"""`worker(task, on_progress, should_stop) -> result`. Raises `TaskInterrupted` if `should_stop()` returned True."""
WorkerFactory = Callable[[], Worker]
"""Function that is called in the worker's process and returns the worker. The function must be picklable."""


class TaskInterrupted(Exception):
    """Raised by a task that ended early, because `should_stop()` returned True."""


class EngineUnavailableError(EdjeError):
    """The engine cannot start on this machine, or cannot reach its Ray cluster."""


@dataclass(frozen=True)
class TaskDone:
    """The task finished and returned `result`."""

    task: Task
    result: Any


@dataclass(frozen=True)
class TaskFailure:
    """The task raised an exception, or too many workers died or stalled while running the task.

    Attributes:
        message: description of the failure for the user, in one line.
        trace: traceback of the worker, for debugging; empty if there is none.
    """

    task: Task
    message: str
    trace: str = ""


Outcome = TaskDone | TaskFailure


@dataclass(frozen=True)
class Notice:
    """News about the machines that run the tasks.

    Attributes:
        message: the news for the user, in one line.
        repeated: task that runs again because its machine was lost; None if the news are about no task. Nothing is
            known against this task.
        is_warning: True if a node left or was lost, or if the job waits for nodes.
    """

    message: str
    repeated: Task | None = None
    is_warning: bool = False


class Engine(Protocol):
    """Runs tasks on workers and yields their outcomes."""

    name: str

    def run(
        self,
        make_worker: WorkerFactory,
        tasks: Iterable[Task | None],
        *,
        on_progress: Callable[[Any], None],
        should_stop: Callable[[], bool],
    ) -> Generator[Outcome | Notice, None, None]:
        """Run every task and yield the outcomes in order of completion, and notices between them.

        Once `should_stop()` returns True, no further task starts. The running tasks are told to stop, and the generator
        ends.

        Args:
            make_worker: called once in each worker process; returns the worker.
            tasks: tasks to run; the engine takes the next task when a worker is free. None instead of a task means
                that the next task is not known yet. The engine then asks again after a moment.
            on_progress: called with the latest progress of each worker, in the process that called `run`.
            should_stop: returns True to stop. The engine calls this function often, so the function must be fast.

        Raises:
            EngineUnavailableError: the engine cannot start.
            EdjeError: a worker cannot be built, or the engine failed during the run.
        """
        ...


def build_worker(make_worker: WorkerFactory) -> Worker:
    """Call `make_worker` and return the worker. Raises EdjeError if `make_worker` fails."""
    try:
        with paused_collector():
            return make_worker()
    except Exception as error:
        raise EdjeError(f"a worker could not start: {describe_error(error)}") from error


def run_task(
    worker: Worker, task: Task, on_progress: Callable[[Any], None], should_stop: Callable[[], bool]
) -> Outcome | None:
    """Run `task` in this process and return the outcome. Return None if the task was stopped early."""
    try:
        return TaskDone(task, worker(task, on_progress, should_stop))
    except TaskInterrupted:
        return None
    except Exception as error:
        return TaskFailure(task, describe_error(error), "".join(traceback.format_exception(error)))


def describe_error(error: BaseException) -> str:
    """Describe `error` in one line."""
    if isinstance(error, EdjeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = "".join(f" {os.fsdecode(name)}" for name in (error.filename,) if isinstance(name, str | bytes))
        return f"{error.strerror}:{where}" if where else error.strerror
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
