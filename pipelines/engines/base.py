"""The interface of execution engines, and the engine that runs tasks in this process.

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
OnProgress = Callable[[Any], None]
ShouldStop = Callable[[], bool]
Worker = Callable[[Task, OnProgress, ShouldStop], Any]
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
    """News about the machines that run the tasks. `is_warning` is True if something was lost."""

    message: str
    is_warning: bool = False


class Engine(Protocol):
    """Runs tasks on workers and yields their outcomes."""

    name: str

    def run(
        self, make_worker: WorkerFactory, tasks: Iterable[Task], *, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Generator[Outcome | Notice, None, None]:
        """Run every task and yield the outcomes in order of completion, and notices between them.

        Once `should_stop()` returns True, no further task starts. The running tasks are told to stop, and the generator
        ends.

        Args:
            make_worker: called once in each worker process; returns the worker.
            tasks: tasks to run; the engine takes the next task when a worker is free.
            on_progress: called with the latest progress of each worker, in the process that called `run`.
            should_stop: returns True to stop. The engine calls this function often, so the function must be fast.

        Raises:
            EngineUnavailableError: the engine cannot start.
            EdjeError: a worker cannot be built, or the engine failed during the run.
        """
        ...


def open_engine(name: str, workers: int | None, *, cpus: int = 1, gpus: int = 0, address: str | None = None) -> Engine:
    """Return the execution engine `name`: "inline" or "ray".

    The other arguments configure `RayEngine`. The inline engine ignores these arguments.

    Raises:
        UsageError: `address` does not have the form host:port.
    """
    if name == "inline":
        return InlineEngine()
    from pipelines.engines.ray_engine import RayEngine

    return RayEngine(workers, cpus=cpus, gpus=gpus, address=address)


class InlineEngine:
    """Engine that runs tasks in the calling thread."""

    name = "inline"

    def run(
        self, make_worker: WorkerFactory, tasks: Iterable[Task], *, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Generator[Outcome | Notice, None, None]:
        worker = build_worker(make_worker)
        for task in tasks:
            outcome = None if should_stop() else run_task(worker, task, on_progress, should_stop)
            if outcome is None:
                return
            yield outcome


def build_worker(make_worker: WorkerFactory) -> Worker:
    """Call `make_worker` and return the worker. Raises EdjeError if `make_worker` fails."""
    try:
        with paused_collector():
            return make_worker()
    except Exception as error:
        raise EdjeError(f"a worker could not start: {describe_error(error)}") from error


def run_task(worker: Worker, task: Task, on_progress: OnProgress, should_stop: ShouldStop) -> Outcome | None:
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
