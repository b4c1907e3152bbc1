"""The interface of execution engines, and the engines that run tasks in this process.

Tasks must be safe to repeat: if a worker process dies, its task runs again on another
worker.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from pipelines.collector import paused_collector
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.errors import EdjeError, TaskInterrupted
from storage_formats.threads import submit

_POLL_SECONDS = 0.2

Task = Any
OnProgress = Callable[[Any], None]
Worker = Callable[[Task, OnProgress, ShouldStop], Any]
"""Function `worker(task, on_progress, should_stop)` that runs a task and returns its
result. It raises `TaskInterrupted` if `should_stop()` returned True.
"""
WorkerFactory = Callable[[], Worker]
"""Function that returns a worker. It is called in the process of the worker, so it must
be picklable. A worker may have a method `close`, which ends what the worker started.
"""


class EngineUnavailableError(EdjeError):
    """The engine cannot start on this machine, or cannot reach the Ray cluster."""

    remedy = "inline"


class TaskFailedError(EdjeError):
    """A task raised an exception, or too many workers died or stalled while running
    the task.
    """

    # Unpickling calls the class with the message only, and then sets `task`.
    def __init__(self, message: str, task: Task = None) -> None:
        super().__init__(message)
        self.task = task


Engine = Callable[..., Generator[Any, None, None]]
"""Function that runs every task on workers, and yields the results. It has the
arguments of `run_inline`.
"""


def open_engine(name: str, workers: int | None, **of_ray: Any) -> Engine:
    """Return an execution engine.

    Args:
        name: "inline" or "ray".
        workers: number of threads or of Ray workers.
        of_ray: `cpus`, `gpus`, `address` and `lock`, see `ray_engine.run_on_ray`. The
            engine inline does not use these arguments.
    """
    if name == "inline":
        return functools.partial(run_inline, threads=workers or 1)
    from pipelines.engines.ray_engine import run_on_ray

    return functools.partial(run_on_ray, workers=workers, **of_ray)


def run_inline(
    make_worker: WorkerFactory,
    tasks: Iterable[Task],
    *,
    on_progress: OnProgress,
    on_event: OnEvent,
    should_stop: ShouldStop,
    threads: int = 1,
) -> Generator[Any, None, None]:
    """Run every task in a thread of this process, and yield the results.

    All engines have the following arguments, apart from `threads`. They yield the
    results in the order in which the tasks end. Once `should_stop()` returns True, an
    engine stops the running tasks, and the generator ends.

    Args:
        make_worker: called once in each worker process; returns the worker. The threads
            share one worker, which must be thread-safe if there are several.
        tasks: tasks to run. Each is passed to a worker.
        on_progress: called in the calling thread with the latest progress of each
            worker.
        on_event: called with messages about the machines that run the tasks.
        should_stop: returns True to stop. An engine calls this function often, so the
            function must be fast. This engine calls it in its threads.
        threads: number of threads.

    Raises:
        EngineUnavailableError: the engine cannot start.
        TaskFailedError: a task failed. No further task runs.
        EdjeError: a worker cannot be built, or the engine failed during the run.
    """
    worker = build_worker(make_worker)
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ended = threading.Event()

    def stops() -> bool:
        return ended.is_set() or should_stop()

    def run(task: Task) -> Any:
        if stops():
            raise TaskInterrupted
        return run_task(worker, task, reports.put, stops)

    remaining = iter(tasks)
    running: set[Future[Any]] = set()
    pool = ThreadPoolExecutor(threads, "edje-task")
    waits = True
    try:
        while True:
            # Submit up to two tasks per thread, so that a thread that has ended a task
            # finds the next one.
            new = itertools.islice(remaining, 2 * threads - len(running))
            running.update(submit(pool, run, task) for task in new)
            if not running:
                return
            done, running = wait(running, _POLL_SECONDS, FIRST_COMPLETED)
            while not reports.empty():
                on_progress(reports.get())
            for future in done:
                yield future.result()
    except TaskInterrupted:
        return
    except KeyboardInterrupt:
        # Do not wait for the threads: one may hang in a read.
        waits = False
        raise
    finally:
        ended.set()
        pool.shutdown(wait=waits, cancel_futures=True)
        if hasattr(worker, "close"):
            worker.close()


def build_worker(make_worker: WorkerFactory) -> Worker:
    """Call `make_worker`, and return the worker. Raise EdjeError if `make_worker`
    raises an exception.
    """
    try:
        with paused_collector():
            return make_worker()
    except Exception as error:
        raise EdjeError(f"a worker could not start: {describe_error(error)}") from error


def run_task(
    worker: Worker,
    task: Task,
    on_progress: OnProgress,
    should_stop: ShouldStop,
) -> Any:
    """Run `task` in this process, and return its result.

    Raises:
        TaskFailedError: the task failed. The error contains the traceback as text, so
            that it can be sent to another process.
        TaskInterrupted: the task was stopped.
    """
    try:
        return worker(task, on_progress, should_stop)
    except TaskInterrupted:
        raise
    except Exception as error:
        failure = TaskFailedError(describe_error(error), task)
        failure.add_note("".join(traceback.format_exception(error)))
        raise failure from None


def machine_gpus() -> int:
    """Return the number of GPUs that Ray uses on this machine, at least 1. Without Ray,
    return 1.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 1
    here = ray.get_runtime_context().get_node_id()
    resources = (node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
    return max(1, int(next(resources).get("GPU", 1)))


def describe_error(error: BaseException) -> str:
    """Return a description of `error` in one line, for a message to the user."""
    if isinstance(error, EdjeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        if isinstance(error.filename, str | bytes):
            return f"{error.strerror}: {os.fsdecode(error.filename)}"
        return error.strerror
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
