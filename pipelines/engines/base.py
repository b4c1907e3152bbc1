"""The interface of execution engines, and the engines that run tasks in this process.

Tasks must be safe to repeat: if a worker process dies, its task runs again on another
worker.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from pipelines.collector import paused_collector
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.errors import EdjeError, TaskInterrupted
from storage_formats.threads import usable_cpus

CLUSTER = "edje-index"
"""Ray namespace of the processes that join a Ray cluster for a job, and of their
workers. A local Ray has another namespace.
"""

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

    def __init__(
        self,
        message: str,
        task: Task,
    ) -> None:
        # Unpickling calls the class with the `args` of the exception. So they must be
        # all arguments of this method.
        super().__init__(message, task)
        self.task = task

    def __str__(self) -> str:
        return str(self.args[0])


Engine = Callable[..., Generator[Any, None, None]]
"""Function that runs every task on workers, and yields the results. It has the
arguments of `run_inline`.
"""


def open_engine(
    name: str,
    workers: int | None,
    *,
    cpus: int = 1,
    gpus: float = 0,
    address: str | None = None,
    lock: Path | None = None,
) -> Engine:
    """Return an execution engine.

    Args:
        name: "inline", "threads" or "ray".
        workers: number of threads or of Ray workers. The engine inline has one worker.
        cpus, gpus, address, lock: see `ray_engine.run_on_ray`. The other engines do not
            use these arguments.
    """
    if name == "inline":
        return run_inline
    if name == "threads":
        return functools.partial(run_on_threads, threads=workers)
    from pipelines.engines.ray_engine import run_on_ray

    return functools.partial(
        run_on_ray, workers=workers, cpus=cpus, gpus=gpus, address=address, lock=lock
    )


def run_inline(
    make_worker: WorkerFactory,
    tasks: Iterable[Task],
    *,
    on_progress: OnProgress,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> Generator[Any, None, None]:
    """Run every task in the calling thread, and yield the results.

    All engines have the following arguments. They yield the results in the order in
    which the tasks end. Once `should_stop()` returns True, an engine tells the running
    tasks to stop, and the generator ends.

    Args:
        make_worker: called once in each worker process; returns the worker.
        tasks: tasks to run. Each is passed to a worker.
        on_progress: called in the calling process with the latest progress of each
            worker.
        on_event: called with messages about the machines that run the tasks.
        should_stop: returns True to stop. An engine calls this function often, so the
            function must be fast.

    Raises:
        EngineUnavailableError: the engine cannot start.
        TaskFailedError: a task failed. No further task runs.
        EdjeError: a worker cannot be built, or the engine failed during the run.
    """
    worker: Worker | None = None
    with contextlib.ExitStack() as stack, contextlib.suppress(TaskInterrupted):
        for task in tasks:
            if should_stop():
                return
            if worker is None:
                worker = build_worker(make_worker)
                stack.callback(close_worker, worker)
            yield run_task(worker, task, on_progress, should_stop)


def run_on_threads(
    make_worker: WorkerFactory,
    tasks: Iterable[Task],
    *,
    on_progress: OnProgress,
    on_event: OnEvent,
    should_stop: ShouldStop,
    threads: int | None = None,
) -> Generator[Any, None, None]:
    """Run every task in a thread of this process, and yield the results. See
    `run_inline` for the other arguments and the errors.

    Args:
        make_worker: called once; returns the worker that all threads share. The worker
            must be thread-safe.
        should_stop: as for `run_inline`, but it must also be thread-safe.
        threads: number of threads; None is the number of CPUs.
    """
    worker = build_worker(make_worker)
    count = threads or usable_cpus()
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
    pool = ThreadPoolExecutor(count, "edje-task")
    waits = True
    try:
        while True:
            # Submit up to two tasks per thread, so that a thread that has ended a task
            # finds the next one.
            room = 2 * count - len(running)
            new = itertools.islice(remaining, room)
            running.update(pool.submit(run, task) for task in new)
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
        close_worker(worker)


def build_worker(make_worker: WorkerFactory) -> Worker:
    """Call `make_worker`, and return the worker. Raise EdjeError if `make_worker`
    raises an exception.
    """
    try:
        with paused_collector():
            return make_worker()
    except Exception as error:
        raise EdjeError(f"a worker could not start: {describe_error(error)}") from error


def close_worker(worker: Worker) -> None:
    """Call the method `close` of `worker`, if it has one."""
    if hasattr(worker, "close"):
        worker.close()


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


def count_metrics(values: Mapping[str, float]) -> None:
    """Add `values`, by name, to the counters that Ray exports for Prometheus. Outside a
    Ray cluster, do nothing.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    # A local Ray has another namespace.
    if ray.get_runtime_context().namespace == CLUSTER:
        for name, value in values.items():
            if value > 0:
                _counter(f"edje_{name}").inc(value)


@functools.cache
def _counter(name: str) -> Any:
    from ray.util.metrics import Counter

    return Counter(name, "edje-index: sum over finished shards")


def describe_error(error: BaseException) -> str:
    """Return a description of `error` in one line, for a message to the user."""
    if isinstance(error, EdjeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = "".join(
            f" {os.fsdecode(name)}"
            for name in (error.filename,)
            if isinstance(name, str | bytes)
        )
        return f"{error.strerror}:{where}" if where else error.strerror
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
