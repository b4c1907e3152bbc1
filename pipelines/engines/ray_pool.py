"""The actors of a Ray run: which task is on which, what they report, and what becomes of those that die.

Imports no Ray: it is handed the connection.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pipelines.engines.base import (
    Outcome,
    Task,
    TaskDone,
    TaskFailure,
    TaskInterrupted,
    Worker,
    WorkerFactory,
    describe_error,
    describe_trace,
)
from storage_formats.errors import EdjeError

ATTEMPTS = 3
"""Worker processes that a task may cost before it is given up."""

_POLL_SECONDS = 1.0
_WAKE_SECONDS = 0.2  # bounds how late a stop request, or the death of Ray, is seen
_STOP_GRACE_SECONDS = 60.0  # a batch of a large model on few cores takes seconds
_CONTROL = "control"  # group of calls that a worker answers while it is at a task


class RayDied(Exception):
    """A process that a local Ray cannot do without has ended."""


@dataclass(frozen=True)
class RayCluster:
    """A connection to Ray; `node` holds the processes of a Ray that was started for this run."""

    ray: Any
    node: Any = None

    def check_alive(self) -> None:
        """Ray itself may need minutes to see this, or end this process."""
        if self.node is not None and (dead := self.node.dead_processes()):
            raise RayDied(f"Ray ended in mid-run (its {dead[0][0]} process is gone)")


class _WorkerActor:
    """Lives in the worker's process: one thread runs tasks, another answers `progress` and `stop`."""

    def __init__(self, make_worker: WorkerFactory) -> None:
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._progress: Any = None
        self._stop = threading.Event()

    def run(self, task: Task) -> _Reply:
        self._progress = None
        try:
            self._worker = self._worker or self._make_worker()
        except Exception as error:
            return _Reply("unusable", describe_error(error), describe_trace(error))
        try:
            return _Reply("done", self._worker(task, self._report, self._stop.is_set))
        except TaskInterrupted:
            return _Reply("stopped")
        except Exception as error:
            return _Reply("failed", describe_error(error), describe_trace(error))

    def progress(self) -> Any:
        return self._progress

    def stop(self) -> None:
        self._stop.set()

    def _report(self, progress: Any) -> None:
        self._progress = progress


@dataclass(frozen=True)
class _Reply:
    """What `_WorkerActor.run` answers; errors travel as text, because not every exception can be pickled."""

    status: Literal["done", "stopped", "failed", "unusable"]
    value: Any = None
    trace: str = ""


@dataclass
class _Work:
    """A task and how many processes it has cost."""

    task: Task
    deaths: int = 0


@dataclass(eq=False)
class _Slot:
    """An actor, and the call and the work that it is at, if any."""

    actor: Any
    call: Any = None
    work: _Work | None = None
    poll: Any = None


class ActorPool:
    """The actors of one run: each has one task at a time, and no more tasks are taken than there are actors."""

    def __init__(
        self, cluster: RayCluster, make_worker: WorkerFactory, tasks: Iterable[Task], needs: dict[str, int]
    ) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self._make_worker = make_worker
        self._tasks = iter(tasks)
        self._again: deque[_Work] = deque()
        self._slots: list[_Slot] = []
        self._actor = self._ray.remote(
            num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_restarts=0, concurrency_groups={_CONTROL: 1}
        )(_WorkerActor)

    def run(
        self, workers: int, on_progress: Callable[[Any], None], should_stop: Callable[[], bool]
    ) -> Generator[Outcome, None, None]:
        next_poll = time.monotonic() + _POLL_SECONDS
        while not should_stop():
            self._hand_out(workers)
            if not self._calls():
                return
            try:
                yield from self._collect(on_progress)
            except RayDied as error:
                if should_stop():  # a signal to the whole process group ends Ray as well
                    return
                raise EdjeError(f"{error}; what is finished is kept") from error
            if time.monotonic() > next_poll:
                self._poll()
                next_poll = time.monotonic() + _POLL_SECONDS
        with contextlib.suppress(RayDied):
            yield from self._wind_down(on_progress)

    def _hand_out(self, workers: int) -> None:
        """Give every free worker a task, and start workers as long as there are tasks for them."""
        while True:
            slot = next((slot for slot in self._slots if slot.work is None), None)
            if slot is None and len(self._slots) >= workers:
                return
            work = self._next_work()
            if work is None:
                self._dismiss_idle()
                return
            if slot is None:
                slot = _Slot(self._actor.remote(self._make_worker))
                self._slots.append(slot)
            slot.work, slot.call = work, slot.actor.run.remote(work.task)

    def _dismiss_idle(self) -> None:
        """End workers that no task is left for: in a cluster others, not yet started, may wait for their room."""
        for slot in [slot for slot in self._slots if slot.work is None]:
            self._slots.remove(slot)
            self._ray.kill(slot.actor)

    def _next_work(self) -> _Work | None:
        if self._again:
            return self._again.popleft()
        return next((_Work(task) for task in self._tasks), None)

    def _wind_down(self, on_progress: Callable[[Any], None]) -> Generator[Outcome, None, None]:
        """Ask every worker to give up, and take what ends within the grace period."""
        deadline = time.monotonic() + _STOP_GRACE_SECONDS
        for slot in self._slots:
            self._control(slot, "stop")
        while self._calls() and time.monotonic() < deadline:
            yield from self._collect(on_progress)

    def _calls(self) -> dict[Any, _Slot]:
        return {slot.call: slot for slot in self._slots if slot.work is not None}

    def _control(self, slot: _Slot, method: str) -> Any:
        return getattr(slot.actor, method).options(concurrency_group=_CONTROL).remote()

    def _poll(self) -> None:
        for slot in self._slots:
            if slot.work is not None and slot.poll is None:
                slot.poll = self._control(slot, "progress")

    def _collect(self, on_progress: Callable[[Any], None]) -> Generator[Outcome, None, None]:
        """Wait a moment, and take in what has come: progress, and the ends of tasks and of workers."""
        calls, polls = self._calls(), {slot.poll: slot for slot in self._slots if slot.poll is not None}
        ready, _ = self._ray.wait([*calls, *polls], num_returns=1, timeout=_WAKE_SECONDS)
        self._cluster.check_alive()
        for ref in ready:
            if ref in polls:
                self._take_progress(polls[ref], on_progress)
            elif (outcome := self._take_reply(calls[ref])) is not None:
                yield outcome

    def _take_progress(self, slot: _Slot, on_progress: Callable[[Any], None]) -> None:
        poll, slot.poll = slot.poll, None
        with contextlib.suppress(self._ray.exceptions.RayError):  # its death shows at the task's own call
            progress = self._ray.get(poll)
            if progress is not None:
                on_progress(progress)

    def _take_reply(self, slot: _Slot) -> Outcome | None:
        work = slot.work
        assert work is not None
        try:
            reply = self._ray.get(slot.call)
        except self._ray.exceptions.RayTaskError as error:  # the reply could not be pickled, for one
            reply = _Reply("failed", describe_error(error.cause or error), str(error))
        except self._ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                last_line = str(error).strip().splitlines()[-1]
                raise EdjeError(f"a worker could not start: {last_line} (every node needs edje-index)") from error
            return self._bury(slot, work)
        slot.work = slot.call = slot.poll = None  # what a poll says now is of a task that is counted already
        if reply.status == "unusable":
            raise EdjeError(f"a worker could not start: {reply.value}")
        if reply.status == "failed":
            return TaskFailure(work.task, reply.value, reply.trace)
        return TaskDone(work.task, reply.value) if reply.status == "done" else None

    def _bury(self, slot: _Slot, work: _Work) -> Outcome | None:
        """The worker's process is gone: another one will run its task, unless too many have died of it."""
        self._cluster.check_alive()
        self._slots.remove(slot)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(slot.actor)
        work.deaths += 1
        if work.deaths < ATTEMPTS:
            self._again.append(work)
            return None
        return TaskFailure(
            work.task,
            f"{ATTEMPTS} worker processes died while running it (killed, out of memory, or a crash in native code)",
        )
