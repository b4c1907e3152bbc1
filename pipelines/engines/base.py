"""What an execution engine is: tasks in, one outcome for each task out.

A worker is built once in the process that will run it and then takes one task after another. Tasks must be
safe to run again: an engine whose worker process dies runs the task anew on another worker.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from storage_formats.errors import EdjeError

Task = Any
Worker = Callable[[Task, Callable[[Any], None], Callable[[], bool]], Any]
"""`worker(task, on_progress, should_stop) -> result`; raises `TaskInterrupted` when `should_stop()` made it give up."""
WorkerFactory = Callable[[], Worker]
"""Picklable: it travels to the worker's process and is called there."""


class TaskInterrupted(Exception):
    """Raised by a worker that gave a task up because it was asked to stop."""


@dataclass(frozen=True)
class TaskDone:
    """The task ran to its end."""

    task: Task
    result: Any


@dataclass(frozen=True)
class TaskFailure:
    """The task raised, or its worker died too often.

    Attributes:
        message: one line for people.
        trace: the worker's traceback, for debugging; empty where there is none.
    """

    task: Task
    message: str
    trace: str = ""


Outcome = TaskDone | TaskFailure


class Engine(Protocol):
    """Runs tasks on workers."""

    name: str

    def run(
        self,
        make_worker: WorkerFactory,
        tasks: Iterable[Task],
        *,
        on_progress: Callable[[Any], None],
        should_stop: Callable[[], bool],
    ) -> Generator[Outcome, None, None]:
        """Run every task and yield its outcome, in the order of completion.

        Close the iterator to end early. When `should_stop()` turns true no further task begins, running ones are
        asked to give up, and the iterator ends; tasks without an outcome were not done.

        Args:
            make_worker: called once in each worker process.
            tasks: read as workers become free, never all at once.
            on_progress: receives, in this process, the latest of what the workers report.
            should_stop: asked often; cheap.

        Raises:
            EdjeError: no worker can be built, or the engine itself broke down.
        """
        ...


def describe_error(error: BaseException) -> str:
    """One line about `error` for people: what the operating system says, with the file, or the error's own words."""
    if isinstance(error, EdjeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = "".join(f" {os.fsdecode(name)}" for name in (error.filename,) if isinstance(name, str | bytes))
        return f"{error.strerror}:{where}" if where else error.strerror
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe_trace(error: BaseException) -> str:
    """The traceback of `error` as text."""
    return "".join(traceback.format_exception(error))
