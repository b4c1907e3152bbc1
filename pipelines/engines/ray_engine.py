"""The Ray engine, which runs workers as Ray actors on this machine or in a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from pipelines.engines.base import (
    Notice,
    Outcome,
    Task,
    TaskFailure,
    Worker,
    WorkerFactory,
    build_worker,
    describe_error,
    run_task,
)
from pipelines.engines.ray_cluster import RayCluster, RayDied, connected_ray, current_node_id
from pipelines.engines.ray_nodes import NODE_WAIT_SECONDS, RayNodes
from pipelines.progress.wording import duration
from storage_formats.errors import EdjeError, UsageError

ATTEMPTS = 4
"""A task fails once this number of workers have died or stalled while running the task.

`edje_index.indexing.attempts` needs three attempts to find the input that makes workers die.
"""

FORGIVEN_LOSSES = 5
"""So many nodes may be lost under a task before further losses count like deaths of workers.

An input that makes a whole machine fail would otherwise be tried without end.
"""

STALL_SECONDS = 600.0
"""A worker without progress for this long is replaced. One batch of a large model on few cores takes minutes."""

_POLL_SECONDS = 0.5
_MAX_POLL_SECONDS = 2.0  # a longer pause of this process (Ctrl-Z) does not count as a stall of the workers
_STOP_GRACE_SECONDS = 60.0
_LOSS_SECONDS = 10.0  # the raylet of a machine that goes away may answer for some seconds after its workers died

_NO_MORE = object()


class RayEngine:
    """Engine that runs tasks in Ray actors. See `pipelines.engines.base.Engine`.

    Args:
        workers: largest number of actors; None starts as many actors as the cluster can run at the same time. Nodes
            that join during the run get actors too.
        cpus: CPUs per actor.
        gpus: GPUs per actor.
        address: address of the head of a Ray cluster to join, "host:port"; None starts Ray on this machine.
        stall_seconds: seconds without progress after which a worker is killed. Its task then runs on another worker.
        node_wait_seconds: seconds without a node with room for a worker after which a run ends with an error.
    """

    name = "ray"

    def __init__(
        self,
        workers: int | None,
        *,
        cpus: int = 1,
        gpus: int = 0,
        address: str | None = None,
        stall_seconds: float = STALL_SECONDS,
        node_wait_seconds: float = NODE_WAIT_SECONDS,
    ) -> None:
        if address is not None and not re.fullmatch(r"[^/]+:\d+", address):
            raise UsageError(f"the address '{address}' of the Ray cluster is not of the form host:port")
        self._workers = workers
        self._cpus, self._gpus = cpus, gpus
        self._address = address
        self._stall_seconds = stall_seconds
        self._node_wait_seconds = node_wait_seconds

    def run(
        self,
        make_worker: WorkerFactory,
        tasks: Iterable[Task | None],
        *,
        on_progress: Callable[[Any], None],
        should_stop: Callable[[], bool],
    ) -> Generator[Outcome | Notice, None, None]:
        count = self._workers or 1
        with connected_ray(self._address, cpus=count * self._cpus, gpus=count * self._gpus) as cluster:
            nodes = RayNodes(cluster, cpus=self._cpus, gpus=self._gpus, wait_seconds=self._node_wait_seconds)
            options = {"num_cpus": self._cpus, "num_gpus": self._gpus, "max_concurrency": 2}  # run, exchange
            actor_class = cluster.ray.remote(**options)(_WorkerActor)
            pool = _Pool(
                cluster, nodes, lambda: actor_class.remote(make_worker), tasks, stall_seconds=self._stall_seconds
            )
            try:
                yield from pool.run(self._workers, on_progress, should_stop)
            except RayDied:
                if not should_stop():  # a signal to the whole process group ends Ray as well
                    raise


class _WorkerActor:
    """Ray actor that runs tasks. One thread runs the tasks; another thread answers calls of `exchange`."""

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
        """Return the latest progress of the running task, or None. If `stop` is true, stop the task."""
        if stop:
            self._stop.set()
        return self._progress

    def node_id(self) -> str:
        """Return the id of the node that this actor runs on."""
        return current_node_id()

    def _report(self, progress: Any) -> None:
        self._progress = progress


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """A task, with the numbers of its workers that died or stalled, and of its nodes that were lost."""

    task: Task
    lost_workers: int = 0
    lost_nodes: int = 0


@dataclasses.dataclass
class _Assignment:
    """A task that runs on an actor.

    Attributes:
        attempt: the task, and what happened to its workers before.
        question: pending request for the progress of the task; None if there is none.
        progress: latest progress that the worker reported.
        stalled_seconds: seconds since `progress` last changed, not counting pauses of this process.
    """

    actor: _Actor
    attempt: _Attempt
    question: Any = None
    progress: Any = None
    stalled_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Actor:
    """A Ray actor, and the ids of the nodes that it may be on: one node once the actor has started."""

    handle: Any
    nodes: frozenset[str]


@dataclasses.dataclass(frozen=True)
class _Death:
    """The death of an actor, until it is known whether its whole node is lost.

    Attributes:
        actor: the actor that died or stalled.
        attempt: the task that the actor ran; None if the actor was starting.
        decided_at: time from which on the death is that of a process, unless the node is lost.
    """

    actor: _Actor
    attempt: _Attempt | None
    decided_at: float


class _Pool:
    """Gives each actor one task at a time."""

    def __init__(
        self,
        cluster: RayCluster,
        nodes: RayNodes,
        start_actor: Callable[[], Any],
        tasks: Iterable[Task | None],
        *,
        stall_seconds: float,
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._ray = cluster.ray
        self._start_actor = start_actor
        self._stall_seconds = stall_seconds
        self._tasks = iter(tasks)
        self._has_more = True
        self._waiting: list[_Attempt] = []
        self._starting: dict[Any, _Actor] = {}  # by the reference of their first answer
        self._idle: list[_Actor] = []
        self._running: dict[Any, _Assignment] = {}  # by the reference of the actor's reply
        self._deaths: list[_Death] = []

    def run(
        self, max_workers: int | None, on_progress: Callable[[Any], None], should_stop: Callable[[], bool]
    ) -> Generator[Outcome | Notice, None, None]:
        deadline = None
        polled_at = time.monotonic()
        while deadline is None or time.monotonic() < deadline:
            if not should_stop():
                yield from self._nodes.refresh()
                self._assign_tasks(min(max_workers or self._nodes.room, self._nodes.room))
            elif deadline is None:
                deadline = time.monotonic() + _STOP_GRACE_SECONDS
            has_work = self._has_more or self._starting or self._waiting or self._deaths
            if not self._running and (deadline or not has_work):
                return
            for answer in self._wait():
                if answer in self._starting:
                    self._admit(answer)
                else:
                    yield from self._end(answer)
            yield from self._judge_deaths()
            seconds, polled_at = min(time.monotonic() - polled_at, _MAX_POLL_SECONDS), time.monotonic()
            for reply, assignment in [*self._running.items()]:
                assignment.stalled_seconds += seconds
                self._exchange(assignment, on_progress, stop=deadline is not None)
                if assignment.stalled_seconds > self._stall_seconds:
                    del self._running[reply]
                    self._bury(assignment.actor, assignment.attempt)

    def _wait(self) -> list[Any]:
        """Wait a moment for answers of actors. Return the references of the answers."""
        references = [*self._starting, *self._running]
        if references:
            references, _ = self._ray.wait(references, timeout=_POLL_SECONDS)
        else:
            time.sleep(_POLL_SECONDS)
        self._cluster.check_alive()
        return references

    def _assign_tasks(self, workers: int) -> None:
        tasks_to_hold = max(workers - len(self._running), 0 if self._running else 1)
        self._take_tasks(tasks_to_hold)
        while self._idle and self._waiting:
            actor, attempt = self._idle.pop(), self._waiting.pop(0)
            self._running[actor.handle.run.remote(attempt.task)] = _Assignment(actor, attempt)
        actors_to_start = min(len(self._waiting), max(0, workers - len(self._running)))
        while len(self._starting) < actors_to_start:
            handle = self._start_actor()
            self._starting[handle.node_id.remote()] = _Actor(handle, self._nodes.ids)
        while len(self._starting) > actors_to_start:
            self._ray.kill(self._starting.popitem()[1].handle)
        # In a busy cluster, a starting actor may wait for the CPUs of idle actors. Idle actors stay only if the next
        # task is not known yet. Then no actor is starting.
        actors_to_keep = max(0, workers - len(self._running)) if self._has_more else 0
        while len(self._idle) > actors_to_keep:
            self._ray.kill(self._idle.pop().handle)

    def _take_tasks(self, count: int) -> None:
        """Take tasks until `count` tasks wait, or the next task is not known yet."""
        while self._has_more and len(self._waiting) < count:
            task = next(self._tasks, _NO_MORE)
            if task is None:
                return
            if task is _NO_MORE:
                self._has_more = False
            else:
                self._waiting.append(_Attempt(task))

    def _admit(self, answer: Any) -> None:
        """Mark a started actor as idle, or record its death."""
        actor = self._starting.pop(answer)
        try:
            node_id = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            self._check_start(error)
            # The actor may have waited for a node that joined after it was created.
            self._bury(_Actor(actor.handle, actor.nodes | self._nodes.ids), None)
        else:
            self._idle.append(_Actor(actor.handle, frozenset([node_id])))

    def _exchange(self, assignment: _Assignment, on_progress: Callable[[Any], None], *, stop: bool) -> None:
        """Pass the progress of a task to `on_progress`. If `stop` is True, tell the worker to stop."""
        if assignment.question is None:
            assignment.question = assignment.actor.handle.exchange.remote(stop)
        elif self._ray.wait([assignment.question], timeout=0)[0]:
            question, assignment.question = assignment.question, None
            with contextlib.suppress(self._ray.exceptions.RayError):  # the reply of the task reports a dead worker
                progress = self._ray.get(question)
                if progress not in (None, assignment.progress):
                    assignment.progress, assignment.stalled_seconds = progress, 0.0
                    on_progress(progress)

    def _end(self, reply: Any) -> Iterator[Outcome]:
        """Yield the outcome of a task that has ended, unless the task will run again."""
        assignment = self._running.pop(reply)
        errors = self._ray.exceptions
        try:
            outcome: Outcome | None = self._ray.get(reply)
        except errors.RayTaskError as error:
            if isinstance(error.cause, EdjeError):  # the worker could not be built
                raise EdjeError(str(error.cause)) from error
            outcome = TaskFailure(None, describe_error(error.cause or error), str(error))  # an unpicklable result
        except errors.RayError as error:
            self._check_start(error)
            self._bury(assignment.actor, assignment.attempt)
            return
        self._idle.append(assignment.actor)
        if outcome is not None:
            yield dataclasses.replace(outcome, task=assignment.attempt.task)

    def _check_start(self, error: Exception) -> None:
        """Raise EdjeError if the worker could not be built, or if the local Ray died."""
        self._cluster.check_alive()
        if getattr(error, "actor_init_failed", False):
            reason = str(error).strip().splitlines()[-1]
            raise EdjeError(
                f"a worker could not start: {reason}; check that edje-index is installed on every node"
            ) from error

    def _bury(self, actor: _Actor, attempt: _Attempt | None) -> None:
        """Kill an actor that died or stalled, and record its death."""
        self._ray.kill(actor.handle)
        grace = 0.0 if self._nodes.is_fixed else _LOSS_SECONDS
        self._deaths.append(_Death(actor, attempt, time.monotonic() + grace))

    def _judge_deaths(self) -> Iterator[Outcome | Notice]:
        """Run the tasks of dead actors again. Only deaths on nodes that are not lost count against a task."""
        for death in [*self._deaths]:
            lost_node = self._nodes.find_lost(death.actor.nodes)
            if lost_node is None and time.monotonic() < death.decided_at:
                continue
            self._deaths.remove(death)
            if lost_node is None:
                yield from self._count_death(death.attempt)
            elif death.attempt is not None:
                yield from self._forgive_loss(death.attempt, f"node {self._nodes.address(lost_node)} was lost")

    def _forgive_loss(self, attempt: _Attempt, message: str) -> Iterator[Outcome | Notice]:
        """Run the task of a lost node again. After `FORGIVEN_LOSSES` of the same task, count the loss as a death."""
        if attempt.lost_nodes < FORGIVEN_LOSSES:
            yield Notice(message, repeated=attempt.task, is_warning=True)
            self._waiting.insert(0, dataclasses.replace(attempt, lost_nodes=attempt.lost_nodes + 1))
        else:
            yield Notice(f"{message}, after {FORGIVEN_LOSSES} other nodes that had the same task", is_warning=True)
            yield from self._count_death(attempt)

    def _count_death(self, attempt: _Attempt | None) -> Iterator[Outcome]:
        """Run the task of a worker that died or stalled again, or let it fail after `ATTEMPTS` lost workers."""
        if attempt is None:  # the actor died before it got a task: blame the next task, so that this ends
            if not self._waiting:
                return
            attempt = self._waiting.pop(0)
        lost_workers = attempt.lost_workers + 1
        if lost_workers < ATTEMPTS:
            self._waiting.append(dataclasses.replace(attempt, lost_workers=lost_workers))
            return
        yield TaskFailure(
            attempt.task,
            f"{ATTEMPTS} worker processes died (killed, out of memory, or a crash in native code) or made no progress "
            f"for {duration(self._stall_seconds)} while running this task",
        )
