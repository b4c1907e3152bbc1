"""The Ray engine: each worker is an actor, on this machine or in a cluster.

`pipelines.engines.ray_cluster` says what a local Ray listens on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from pipelines.engines.base import (
    Outcome,
    Task,
    TaskFailure,
    Worker,
    WorkerFactory,
    build_worker,
    describe_error,
    run_task,
)
from pipelines.engines.ray_cluster import RayCluster, RayDied, connected_ray
from storage_formats.errors import EdjeError, UsageError

ATTEMPTS = 4
"""A task fails when it has ended this many worker processes.

`edje_index.indexing.attempts` needs three to find an input that ends them.
"""

_POLL_SECONDS = 1.0
_WAKE_SECONDS = 0.2  # longest delay before a stop, or the end of Ray, is noticed
_STOP_GRACE_SECONDS = 60.0  # one batch of a large model on few cores takes seconds
_CONTROL = "control"  # a worker answers calls of this group while it runs a task
_END = object()


class RayEngine:
    """Runs tasks in Ray actors; see `pipelines.engines.base.Engine`.

    Args:
        workers: number of actors; None starts as many as the cluster has room for.
        cpus: CPUs per actor.
        gpus: GPUs per actor.
        address: head of a Ray cluster to join, "host:port"; None starts Ray on this machine.
    """

    name = "ray"

    def __init__(self, workers: int | None, *, cpus: int = 1, gpus: int = 0, address: str | None = None) -> None:
        if address is not None and not re.fullmatch(r"[^/]+:\d+", address):
            raise UsageError(f"cannot join {address}: give the address of the cluster's head as host:port")
        self._workers = workers
        self._cpus, self._gpus = cpus, gpus
        self._address = address

    def run(
        self,
        make_worker: WorkerFactory,
        tasks: Iterable[Task],
        *,
        on_progress: Callable[[Any], None],
        should_stop: Callable[[], bool],
    ) -> Generator[Outcome, None, None]:
        count = self._workers or 1
        with connected_ray(self._address, cpus=count * self._cpus, gpus=count * self._gpus) as cluster:
            actor_class = cluster.ray.remote(
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                max_restarts=-1,
                max_task_retries=ATTEMPTS - 1,
                concurrency_groups={_CONTROL: 1},
            )(_WorkerActor)
            pool = _Pool(cluster, lambda: actor_class.remote(make_worker), iter(tasks))
            room = cluster.room(cpus=self._cpus, gpus=self._gpus)
            try:
                yield from pool.run(min(self._workers or room, room), on_progress, should_stop)
            except RayDied:
                if not should_stop():  # a signal to the whole process group ends Ray as well
                    raise


class _WorkerActor:
    """Runs in the worker's process: one thread runs tasks, another answers `exchange`."""

    def __init__(self, make_worker: WorkerFactory) -> None:
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._progress: Any = None
        self._stop = threading.Event()

    def run(self, task: Task) -> Outcome | None:
        self._worker = self._worker or build_worker(self._make_worker)
        try:
            outcome = run_task(self._worker, task, self._report, self._stop.is_set)
        finally:
            self._progress = None
        return outcome and dataclasses.replace(outcome, task=None)  # the driver has the task already

    def exchange(self, stop: bool) -> Any:
        """Take the wish to stop, and return the latest progress."""
        if stop:
            self._stop.set()
        return self._progress

    def _report(self, progress: Any) -> None:
        self._progress = progress


@dataclasses.dataclass
class _Running:
    """A task on an actor, and its pending request for progress."""

    actor: Any
    task: Task
    question: Any = None


class _Pool:
    """Gives each actor one task at a time, and takes no more tasks than there are actors."""

    def __init__(self, cluster: RayCluster, start_actor: Callable[[], Any], tasks: Iterator[Task]) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self._start_actor = start_actor
        self._tasks = tasks
        self._running: dict[Any, _Running] = {}  # by the reference of the actor's reply
        self._idle: list[Any] = []
        self._next_poll = 0.0

    def run(
        self, workers: int, on_progress: Callable[[Any], None], should_stop: Callable[[], bool]
    ) -> Generator[Outcome, None, None]:
        while not should_stop():
            self._assign_tasks(workers)
            if not self._running:
                return
            yield from self._collect(on_progress, stop=False)
        self._next_poll = 0.0
        deadline = time.monotonic() + _STOP_GRACE_SECONDS
        while self._running and time.monotonic() < deadline:
            yield from self._collect(on_progress, stop=True)

    def _assign_tasks(self, workers: int) -> None:
        while self._idle or len(self._running) < workers:
            task = next(self._tasks, _END)
            if task is _END:
                self._dismiss_idle()
                return
            actor = self._idle.pop() if self._idle else self._start_actor()
            self._running[actor.run.remote(task)] = _Running(actor, task)

    def _dismiss_idle(self) -> None:
        """End actors without a task: an actor that waits for room in a busy cluster may need theirs."""
        while self._idle:
            self._ray.kill(self._idle.pop())

    def _collect(self, on_progress: Callable[[Any], None], *, stop: bool) -> Generator[Outcome, None, None]:
        """Wait a moment, and yield the outcomes of the tasks that have ended."""
        ready, _ = self._ray.wait([*self._running], timeout=_WAKE_SECONDS)
        self._cluster.check_alive()
        self._exchange(on_progress, stop=stop)
        for reply in ready:
            running = self._running.pop(reply)
            self._idle.append(running.actor)
            outcome = self._outcome(reply, running.task)
            if outcome is not None:
                yield outcome

    def _exchange(self, on_progress: Callable[[Any], None], *, stop: bool) -> None:
        """Pass on the progress of the running tasks, and tell their workers whether to stop."""
        due = time.monotonic() >= self._next_poll
        if due:
            self._next_poll = time.monotonic() + _POLL_SECONDS
        for running in self._running.values():
            self._pass_on_answer(running, on_progress)
            if due and running.question is None:
                control = running.actor.exchange.options(concurrency_group=_CONTROL, max_task_retries=0)
                running.question = control.remote(stop)

    def _pass_on_answer(self, running: _Running, on_progress: Callable[[Any], None]) -> None:
        question = running.question
        if question is None or not self._ray.wait([question], timeout=0)[0]:
            return
        running.question = None
        with contextlib.suppress(self._ray.exceptions.RayError):  # a worker that died shows at its task
            progress = self._ray.get(question)
            if progress is not None:
                on_progress(progress)

    def _outcome(self, reply: Any, task: Task) -> Outcome | None:
        errors = self._ray.exceptions
        try:
            outcome: Outcome | None = self._ray.get(reply)
        except errors.RayTaskError as error:
            if isinstance(error.cause, EdjeError):  # the worker could not be built
                raise EdjeError(str(error.cause)) from error
            return TaskFailure(task, describe_error(error.cause or error), str(error))  # such as an unpicklable result
        except errors.RayError as error:
            self._cluster.check_alive()
            if getattr(error, "actor_init_failed", False):
                reason = str(error).strip().splitlines()[-1]
                raise EdjeError(f"a worker could not start: {reason} (every node needs edje-index)") from error
            return TaskFailure(
                task,
                f"{ATTEMPTS} worker processes died while running it (killed, out of memory, or a crash in native code)",
            )
        return outcome and dataclasses.replace(outcome, task=task)
