"""Runs tasks in Ray actors, and connects to Ray for training: starts a local Ray, or
joins a cluster.

A local Ray listens on 127.0.0.1 only, requires a random token, sends no usage
statistics, and ends with the run. Ray reads the settings for these properties at
import. A program that imports Ray before this module must first set the environment
variables RAY_AUTH_MODE=token and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0.

To join a cluster, this process opens ports for the nodes of the cluster. Set
RAY_AUTH_MODE=token on each node and in this process, and keep the ports behind a
firewall.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pipelines
from pipelines.engines.base import (
    CLUSTER,
    EngineUnavailableError,
    OnProgress,
    Task,
    TaskFailedError,
    Worker,
    WorkerFactory,
    build_worker,
    describe_error,
    run_task,
)
from pipelines.environment import cuda_devices
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage
from pipelines.progress.wording import counted, duration
from storage_formats.errors import EdjeError, TaskInterrupted, UsageError

ATTEMPTS = 5
"""A task fails if so many workers died or stalled while running it.

`edje_index.indexing.shard_encoding` needs four attempts to find an input that makes
workers die, and to leave it out.
"""

STALL_SECONDS = 600.0
"""A worker without progress for this long is replaced. One batch of a large model
on few cores takes minutes.
"""

NODE_WAIT_SECONDS = 600.0
"""A job ends with an error if its cluster lacks room for its workers for this long."""

_POLL_SECONDS = 0.5
# a longer pause of this process (Ctrl-Z) does not count as a stall of the workers
_MAX_DELAY_SECONDS = 1.5
# each takes about 0.4 ms of processor time
_QUESTIONS_PER_SECOND = 200
# A task is late after twice the time of the longest one, and at least so many seconds.
_LATE_SECONDS = 10.0
# A task fails if it has failed on so many nodes.
_FAILED_NODES = 3
_REFRESH_SECONDS = 2.0
_STOP_GRACE_SECONDS = 60.0
_PROBE_SECONDS = 5.0
_START_SECONDS = 60.0
# a folder is locked soon after it is made
_NEW_FOLDER_SECONDS = 3600.0
_FOLDER_PREFIX = "edje-ray-"

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray warns if it is not set
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray prints messages about dead workers and nodes to standard output. The engine
    # reports the same problems itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    # Ray runs workers with nice 15, behind every other program of the machine
    "RAY_worker_niceness": "0",
}
# of every local Ray of this process, because Ray reads it once
_TOKEN = secrets.token_hex(32)
_PRIVATE_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    # makes 127.0.0.1 the address of this node, on Linux too
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


class RayDied(EdjeError):
    """A process of the local Ray has ended, so the local Ray no longer works."""


def run_on_ray(
    make_worker: WorkerFactory,
    tasks: Iterable[Task],
    *,
    on_progress: OnProgress,
    on_event: OnEvent,
    should_stop: ShouldStop,
    workers: int | None = None,
    cpus: int = 1,
    gpus: float = 0,
    address: str | None = None,
    lock: Path | None = None,
    stall_seconds: float = STALL_SECONDS,
    wait_seconds: float = NODE_WAIT_SECONDS,
) -> Generator[Any, None, None]:
    """Run every task in a Ray actor, see `run_inline`. The results come in order of
    completion.

    Args:
        make_worker, tasks, on_progress, on_event, should_stop: see `run_inline`.
        workers: largest number of actors; None starts as many actors as the cluster can
            run at the same time. Nodes that join during the run get actors too.
        address: address of the head of a Ray cluster to join, "host:port"; "auto" finds
            the cluster of this machine, which RAY_ADDRESS may name. None starts Ray on
            this machine.
        lock: file that holds the name of this process; None checks nothing. The machine
            of each worker must see it under the same path, because the workers write
            beside it.
        stall_seconds: seconds without progress after which a worker is killed. Its task
            then runs on another worker.
        wait_seconds: seconds without a node with room for a worker after which the run
            ends with an error.
    """
    with connected_ray(
        address, workers=workers or 1, cpus=cpus, gpus=gpus, wait_seconds=wait_seconds
    ) as cluster:
        holder = None if lock is None else (lock, lock.read_bytes())
        # Its two threads run a task, and answer calls of `exchange`.
        settings = {"num_cpus": cpus, "num_gpus": gpus, "max_concurrency": 2}
        actor_class = cluster.ray.remote(**settings)(EdjeWorker)
        run = _Run(
            cluster,
            actor_class,
            (make_worker, holder),
            deque(_Turn(task) for task in tasks),
            on_progress=on_progress,
            on_event=on_event,
            stall_seconds=stall_seconds,
        )
        yield from run.results(workers, should_stop)


class EdjeWorker:
    """Ray actor that runs tasks. Ray shows its name."""

    def __init__(
        self,
        make_worker: WorkerFactory,
        holder: tuple[Path, bytes] | None,
    ) -> None:
        self._make_worker = make_worker
        self._holder = holder
        self._worker: Worker | None = None
        self._progress: Any = None
        self._stop = threading.Event()

    def node(self) -> str:
        """Return the id of the node of this actor, once the actor has started."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, task: Task) -> list[Any]:
        """Run `task`. Return a list with its result, which is empty if the task was
        stopped.

        Raises:
            TaskFailedError: the task failed.
            EdjeError: the worker cannot start.
        """
        if self._worker is None:
            self._check_directory()
            self._worker = build_worker(self._make_worker)
        self._progress = None
        with contextlib.suppress(TaskInterrupted):
            return [run_task(self._worker, task, self._report, self._stop.is_set)]
        return []

    def exchange(self, stop: bool) -> Any:
        """Return the latest progress of the running task, or None. If `stop` is
        true, stop the task.
        """
        if stop:
            self._stop.set()
        return self._progress

    def _report(self, progress: Any) -> None:
        self._progress = progress

    def _check_directory(self) -> None:
        if self._holder is None:
            return
        lock, content = self._holder
        try:
            if lock.read_bytes() == content:
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise EdjeError(
                f"a worker could not start: {describe_error(error)}"
            ) from error
        raise EdjeError(
            f"the machine {socket.gethostname()} does not see the index directory"
            f" {lock.parents[1]} of this job; put the index into a directory that all"
            " machines share under the same path"
        )


@dataclasses.dataclass
class _Turn:
    """A task that waits or runs.

    Attributes:
        attempt: number of workers that have run the task, with the present one.
        late_on: node that left the task to another one; None if there is none.
        failed_on: nodes on which the task failed with an error.
    """

    task: Task
    attempt: int = 0
    late_on: str | None = None
    failed_on: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class _Job:
    """What an actor does: it runs the task of `turn`, or it starts, if `turn` is None.

    Attributes:
        node: id of the node of the actor; None until the actor has started.
        began: time at which `turn` began.
        is_late: whether another node takes over the task.
        question: pending request for the progress of the task; None if there is none.
        stalled_seconds: seconds since `progress` last changed, not counting pauses of
            this process.
    """

    actor: Any
    node: str | None = None
    turn: _Turn | None = None
    began: float = dataclasses.field(default_factory=time.monotonic)
    is_late: bool = False
    question: Any = None
    progress: Any = None
    stalled_seconds: float = 0.0


@dataclasses.dataclass
class _Run:
    """A run of tasks on the actors of a cluster.

    Attributes:
        actor_class: Ray's class of the actors; `arguments` are those of an actor.
        waiting: tasks that no actor runs.
        jobs: what each actor does, by the reference of its answer.
        idle: the last jobs of actors without a task, which may take over a late one.
        longest: seconds of the longest finished task.
        failing_since: time since when actors die while they start; None if they do not.
    """

    cluster: RayCluster
    actor_class: Any
    arguments: tuple[Any, ...]
    waiting: deque[_Turn]
    on_progress: OnProgress
    on_event: OnEvent
    stall_seconds: float
    jobs: dict[Any, _Job] = dataclasses.field(default_factory=dict)
    idle: list[_Job] = dataclasses.field(default_factory=list)
    longest: float = 0.0
    failing_since: float | None = None
    stopping: bool = False

    def results(
        self,
        workers: int | None,
        should_stop: ShouldStop,
    ) -> Generator[Any, None, None]:
        """Run all tasks on at most `workers` actors, and yield the results."""
        ray = self.cluster.ray
        deadline = float("inf")
        asked_at = time.monotonic()
        while (self.waiting or self.jobs) and time.monotonic() < deadline:
            if not self.stopping and should_stop():
                self.stopping = True
                deadline = time.monotonic() + _STOP_GRACE_SECONDS
                asked_at = 0.0
                self.waiting.clear()
            try:
                self.cluster.refresh(self.on_event)
            except RayDied:
                # a signal to the whole process group ends Ray as well
                if should_stop():
                    return
                raise
            limit = min(workers or self.cluster.room, self.cluster.room)
            while self.waiting and self.idle:
                late_on = self.waiting[0].late_on
                helper = min(self.idle, key=lambda job: job.node == late_on)
                self.idle.remove(helper)
                self._run_next(helper)
            self._start_actors(limit)
            if not self.jobs:
                time.sleep(_POLL_SECONDS)
                continue
            ray.wait([*self.jobs], timeout=_POLL_SECONDS)
            answers, _ = ray.wait([*self.jobs], num_returns=len(self.jobs), timeout=0)
            for answer in answers:
                yield from self._take(answer, limit)
            # so many questions that this process stays idle most of the time
            pause = max(_POLL_SECONDS, len(self.jobs) / _QUESTIONS_PER_SECOND)
            elapsed = time.monotonic() - asked_at
            if elapsed >= pause:
                asked_at = time.monotonic()
                self._ask(min(elapsed, pause + _MAX_DELAY_SECONDS))

    def _start_actors(self, limit: int) -> None:
        starting = sum(job.turn is None for job in self.jobs.values())
        options = {}
        if self.cluster.left_out:
            nodes = ",".join(sorted(self.cluster.left_out))
            options["label_selector"] = {"ray.io/node-id": f"!in({nodes})"}
        for _ in range(min(limit - len(self.jobs), len(self.waiting) - starting)):
            actor = self.actor_class.options(**options).remote(*self.arguments)
            self.jobs[actor.node.remote()] = _Job(actor)

    def _take(
        self,
        answer: Any,
        limit: int,
    ) -> Generator[Any, None, None]:
        """Take the answer of an actor, and give the actor the next task."""
        ray = self.cluster.ray
        job = self.jobs.pop(answer)
        try:
            if job.turn is None:
                job.node = ray.get(answer)
            elif results := ray.get(answer):
                self.longest = max(self.longest, time.monotonic() - job.began)
                yield from results
            elif not self.stopping:
                # it was late, and has stopped
                self.waiting.append(job.turn)
                ray.kill(job.actor)
                return
        except ray.exceptions.RayTaskError as error:
            self._after_error(job, error)
            ray.kill(job.actor)
            return
        except ray.exceptions.RayError as error:
            self._after_death(job, error)
            return
        self.failing_since = None
        if len(self.jobs) >= limit or job.node in self.cluster.left_out:
            ray.kill(job.actor)
        elif self.waiting:
            self._run_next(job)
        else:
            self.idle.append(job)

    def _run_next(self, job: _Job) -> None:
        """Run the next task on the actor of `job`."""
        turn = self.waiting.popleft()
        turn.attempt += 1
        self.jobs[job.actor.run.remote(turn.task)] = _Job(job.actor, job.node, turn)

    def _after_error(
        self,
        job: _Job,
        error: Any,
    ) -> None:
        """Leave out the node on which a task failed, or raise the error if there is no
        other node, or if the task has failed on several.
        """
        turn = job.turn
        cause = error.cause
        # otherwise the result cannot be pickled
        if turn is None or job.node is None or not isinstance(cause, EdjeError):
            raise TaskFailedError(
                describe_error(cause or error), turn and turn.task
            ) from error
        turn.failed_on.add(job.node)
        place = self.cluster.place(job.node)
        is_news = job.node not in self.cluster.left_out
        has_others = self.cluster.leave_out(job.node)
        if not has_others or len(turn.failed_on) == _FAILED_NODES:
            if not place:
                raise cause from error
            raise TaskFailedError(
                f"{describe_error(cause)}{place}", turn.task
            ) from error
        if is_news:
            message = f"no more work{place}: {describe_error(cause)}"
            self.on_event(StatusMessage(message, is_warning=True))
        if not self.stopping:
            self.waiting.appendleft(turn)

    def _after_death(
        self,
        job: _Job,
        error: Any,
    ) -> None:
        turn = job.turn
        if turn is None:
            # perhaps on a lost node that Ray has not noticed
            self.failing_since = self.failing_since or time.monotonic()
            if time.monotonic() - self.failing_since > _START_SECONDS:
                raise EdjeError(
                    f"worker processes die while they start: {describe_error(error)}"
                ) from error
            return
        if turn.attempt == ATTEMPTS:
            raise TaskFailedError(
                f"{ATTEMPTS} worker processes died (killed, out of memory, or a crash"
                " in native code) or made no progress for"
                f" {duration(self.stall_seconds)} while running this task",
                turn.task,
            ) from error
        if not self.stopping:
            self.waiting.appendleft(turn)
            message = (
                f"a worker died{self.cluster.place(job.node)}; its task runs again"
                f" (attempt {turn.attempt + 1} of {ATTEMPTS})"
            )
            self.on_event(StatusMessage(message, is_warning=True))

    def _ask(self, seconds: float) -> None:
        """Ask the actors for progress, `seconds` after the last questions. Kill those
        without progress for too long, and stop one that is late if an actor of another
        node is idle.
        """
        ray = self.cluster.ray
        late = time.monotonic() - max(_LATE_SECONDS, 2 * self.longest)
        questions = [job.question for job in self.jobs.values() if job.question]
        answered = set()
        if questions:
            answered.update(
                ray.wait(questions, num_returns=len(questions), timeout=0)[0]
            )
        for answer, job in [*self.jobs.items()]:
            if job.turn is None:
                # in a busy cluster, an actor may start late or never
                if not self.waiting:
                    ray.kill(self.jobs.pop(answer).actor)
                continue
            job.stalled_seconds += seconds
            if job.question in answered:
                # the actor may have died
                with contextlib.suppress(ray.exceptions.RayError):
                    progress = ray.get(job.question)
                    if progress not in (None, job.progress):
                        job.progress = progress
                        job.stalled_seconds = 0.0
                        self.on_progress(progress)
                job.question = None
            others = {helper.node for helper in self.idle} - {job.node}
            if job.began < late and others and job.turn.late_on is None:
                job.turn.late_on = job.node
                job.is_late = True
                message = (
                    f"a task takes long{self.cluster.place(job.node)}; it runs again on"
                    " another node"
                )
                self.on_event(StatusMessage(message, is_warning=True))
            if job.question is None:
                stop = self.stopping or job.is_late
                job.question = job.actor.exchange.remote(stop)
            if job.stalled_seconds > self.stall_seconds:
                job.stalled_seconds = 0.0
                message = (
                    f"a worker made no progress for {duration(self.stall_seconds)}"
                    f"{self.cluster.place(job.node)}"
                )
                self.on_event(StatusMessage(message, is_warning=True))
                ray.kill(job.actor)


class RayCluster:
    """A connection to Ray, which watches the nodes of a cluster, or the processes of a
    local Ray.

    Args:
        daemons: daemon processes of a local Ray; empty if this process joined a
            cluster.
        min_workers: number of workers without which the job makes no progress.
        wait_seconds: seconds without room for `min_workers` workers after which
            `refresh` raises an error.

    Raises:
        UsageError: the nodes have no room for `min_workers` workers.
    """

    def __init__(
        self,
        ray: Any,
        daemons: Sequence[Any],
        *,
        cpus: int,
        gpus: float,
        min_workers: int,
        wait_seconds: float,
    ) -> None:
        self.ray = ray
        self._daemons = daemons
        self._min_workers = min_workers
        self._wait_seconds = wait_seconds
        self._needs = {
            name: need for name, need in (("CPU", cpus), ("GPU", gpus)) if need
        }
        self._read_at = self._had_room_at = time.monotonic()
        self._nodes = self._read()
        # ids of nodes that get no more work
        self.left_out: set[str] = set()
        if self.room < min_workers:
            raise UsageError(
                f"a worker needs {cpus} CPUs and {gpus:g} GPUs on one node, but the"
                f" nodes of the Ray cluster have room for only {self.room} of"
                f" {counted(min_workers, 'worker')}; add nodes, or use fewer or smaller"
                " workers, or another device"
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    @property
    def room(self) -> int:
        """Number of workers that the nodes can run at the same time."""
        return sum(
            self._node_room(node_id) for node_id in self._nodes.keys() - self.left_out
        )

    def _node_room(self, node_id: str) -> int:
        size = self._nodes[node_id]["Resources"]
        return min(int(size.get(name, 0) // need) for name, need in self._needs.items())

    def leave_out(self, node_id: str) -> bool:
        """Start no more workers on a node, unless it is the last one with room. Return
        whether it is left out.
        """
        others = self._nodes.keys() - self.left_out - {node_id}
        if not any(self._node_room(other) for other in others):
            return False
        self.left_out.add(node_id)
        return True

    def place(self, node_id: str | None) -> str:
        """Return " on node ADDRESS", or "" for a local Ray."""
        node = self._nodes.get(node_id or "")
        if self._daemons or node is None:
            return ""
        return f" on node {node['NodeManagerAddress']}"

    def refresh(self, on_event: OnEvent) -> None:
        """Look which nodes of a cluster joined or left, at most every two seconds, and
        report each of them.

        Raises:
            RayDied: a process that the local Ray needs has ended. Ray itself notices
                this after 15 to 60 seconds.
            EdjeError: there has been no room for the workers for `wait_seconds`.
        """
        import psutil

        for daemon in self._daemons:
            with contextlib.suppress(psutil.NoSuchProcess):
                name = daemon.name()
                if (
                    name in ("raylet", "gcs_server")
                    and daemon.status() == psutil.STATUS_ZOMBIE
                ):
                    raise RayDied(
                        f"Ray ended during the run: its {name} process is gone"
                    )
        if self._daemons or time.monotonic() - self._read_at < _REFRESH_SECONDS:
            return
        before = self._nodes
        self._nodes = self._read()
        self._read_at = time.monotonic()
        for node_id in before.keys() ^ self._nodes.keys():
            change = "left" if node_id in before else "joined"
            address = (before | self._nodes)[node_id]["NodeManagerAddress"]
            message = (
                f"node {address} {change} the cluster, which now has room for"
                f" {counted(self.room, 'worker')}"
            )
            on_event(StatusMessage(message, is_warning=change == "left"))
        if self.room == 0:
            # A lost node may have been taken for another one with room. A node on
            # which work fails again is now the last one, and ends the run.
            self.left_out.clear()
        if self.room >= self._min_workers:
            self._had_room_at = time.monotonic()
        elif time.monotonic() - self._had_room_at > self._wait_seconds:
            raise EdjeError(
                f"for {duration(self._wait_seconds)}, the Ray cluster has had room for"
                f" only {self.room} of {counted(self._min_workers, 'worker')}; add"
                " nodes to the cluster"
            )


@contextlib.contextmanager
def connected_ray(
    address: str | None,
    *,
    workers: int,
    cpus: int,
    gpus: float,
    min_workers: int = 1,
    wait_seconds: float,
) -> Iterator[RayCluster]:
    """Join the cluster at `address`, or start a local Ray for `workers` workers if
    `address` is None.

    Leaving the context disconnects from the cluster, or ends the local Ray. For the
    other arguments, see `RayCluster`.

    Raises:
        EngineUnavailableError: the cluster cannot be joined, or Ray does not start.
        UsageError: the nodes of the cluster have no room for the workers.
    """
    check_ray(address)
    watched = functools.partial(
        RayCluster,
        cpus=cpus,
        gpus=gpus,
        min_workers=min_workers,
        wait_seconds=wait_seconds,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment({**_ENVIRONMENT, **os.environ}))
        if address is not None:
            try:
                ray = _initialize(stack, address=address, namespace=CLUSTER)
            except Exception as error:
                raise _cannot_join(address, error) from error
            yield watched(ray, ())
            return
        _check_importable_privately()
        folder = _local_folder(stack)
        # Workers import this package from any working directory.
        path = os.pathsep.join(
            filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
        )
        values = {"RAY_AUTH_TOKEN": _TOKEN, "RAY_TMPDIR": folder, "PYTHONPATH": path}
        stack.enter_context(_environment(_PRIVATE_ENVIRONMENT | values))
        try:
            ray = _initialize(
                stack,
                # without it, ray.init joins the cluster that RAY_ADDRESS names
                address="local",
                include_dashboard=False,
                # near Ray's minimum: tasks and results are small
                object_store_memory=80 * 2**20,
                num_cpus=workers * cpus,
                num_gpus=math.ceil(workers * gpus),
            )
        except Exception as error:
            raise EngineUnavailableError(
                f"Ray did not start on this machine: {describe_error(error)}"
            ) from error
        import psutil

        children = (
            (child, child.as_dict(["cmdline"], ad_value=())["cmdline"])
            for child in psutil.Process().children()
        )
        yield watched(
            ray,
            [
                child
                for child, words in children
                if any(folder in word for word in words)
            ],
        )


def best_device(address: str | None) -> Literal["cpu", "cuda"]:
    """Return "cuda" if this machine or a node of the Ray cluster at `address` has a
    GPU, else "cpu".
    """
    gpus = cuda_devices()
    if address is not None and not gpus:
        with connected_ray(
            address, workers=1, cpus=1, gpus=0, wait_seconds=NODE_WAIT_SECONDS
        ) as cluster:
            gpus = cluster.ray.cluster_resources().get("GPU", 0)
    return "cuda" if gpus else "cpu"


def check_ray(address: str | None) -> None:
    """Check that Ray is installed and that the cluster at `address` answers, if it is
    not None.

    Raises:
        UsageError: `address` is neither "auto" nor of the form host:port.
        EngineUnavailableError: nothing answers. Ray itself would retry for minutes and
            then end this process.
    """
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    if address in (None, "auto"):
        return
    if not re.fullmatch(r"[^/]+:\d+", address):
        raise UsageError(
            f"the address '{address}' of the Ray cluster is neither 'auto' nor of the"
            " form host:port"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        # the port or the name is too long
        raise _cannot_join(address, error) from error


def _cannot_join(address: str, error: Exception) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"cannot join the Ray cluster at {address}: {describe_error(error)}; if the"
        " cluster requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
    )


def _local_folder(stack: contextlib.ExitStack) -> str:
    """Create the folder of a local Ray, which is removed with `stack`, and remove
    folders of killed processes.
    """
    # a socket's path has at most 107 bytes
    short = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
    parent = os.environ.get("RAY_TMPDIR", short)
    for old in Path(parent).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(old):
            if time.time() - old.stat().st_mtime > _NEW_FOLDER_SECONDS:
                shutil.rmtree(old)
    folder = stack.enter_context(
        tempfile.TemporaryDirectory(
            prefix=f"{_FOLDER_PREFIX}{os.getpid()}-",
            dir=parent,
            ignore_cleanup_errors=True,
        )
    )
    # without locks, no other process can lock the folder to remove it
    with contextlib.suppress(OSError):
        stack.enter_context(_locked(folder))
    return folder


@contextlib.contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """Context with a lock of `folder`, which ends with the process. Raises OSError
    if another process has the lock.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


@functools.cache
def _check_importable_privately() -> None:
    """Raise EngineUnavailableError if Ray was imported without the settings that
    keep a local Ray private.
    """
    missing = [
        f"{name}={value}"
        for name, value in _PRIVATE_ENVIRONMENT.items()
        if os.environ.get(name) != value
    ]
    if "ray" in sys.modules and missing:
        raise EngineUnavailableError(
            "this process imported Ray without the settings that keep a local Ray"
            f" private; set {' and '.join(missing)} before you import ray"
        )


def _initialize(stack: contextlib.ExitStack, **options: Any) -> Any:
    """Call `ray.init` and return the `ray` package. When `stack` is closed, Ray is
    shut down.
    """
    import ray

    stack.callback(ray.shutdown)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        # A worker finds the modules of this project first where its driver finds a
        # package of the same name first.
        hook = (
            {"worker_process_setup_hook": "storage_formats.launch.share_package"}
            if len(pipelines.__path__) > 1
            else None
        )
        ray.init(
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            runtime_env=hook,
            **options,
        )
    finally:
        # ray.init replaces the handler there
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)
    return ray


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            os.environ.pop(name)
        os.environ.update(before)
