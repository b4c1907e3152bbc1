"""Runs tasks in Ray actors, and connects to Ray for training: starts a local Ray, or joins a cluster.

A local Ray listens on 127.0.0.1 only, requires a random token, sends no usage statistics, and ends with the run. Ray
reads the settings for these properties at import. A program that imports Ray before this module must first set the
environment variables RAY_AUTH_MODE=token and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0.

To join a cluster, this process opens ports for the nodes of the cluster. Set RAY_AUTH_MODE=token on each node and in
this process, and keep the ports behind a firewall.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.engines.base import (
    EngineUnavailableError,
    Notice,
    OnProgress,
    Outcome,
    ShouldStop,
    Task,
    TaskFailure,
    Worker,
    WorkerFactory,
    build_worker,
    describe_error,
    run_task,
)
from pipelines.progress.wording import counted, duration
from storage_formats.errors import EdjeError, UsageError

ATTEMPTS = 4
"""Ray starts an actor so many times in all, elsewhere if its node is lost, and runs its task again each time.

The task of an actor that may not start again gets one more actor. It then has at least as many attempts as
`edje_index.indexing.attempts` needs to find an input that makes workers die, and one more.
"""

STALL_SECONDS = 600.0
"""A worker without progress for this long is replaced. One batch of a large model on few cores takes minutes."""

NODE_WAIT_SECONDS = 600.0
"""A job ends with an error if its cluster lacks room for its workers for this long."""

_POLL_SECONDS = 0.5
_MAX_POLL_SECONDS = 2.0  # a longer pause of this process (Ctrl-Z) does not count as a stall of the workers
_REFRESH_SECONDS = 2.0
_STOP_GRACE_SECONDS = 60.0
_PROBE_SECONDS = 5.0
_CLUSTER = "edje-index"  # namespace of workers that run on a cluster

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns if it is not set
    # Ray prints messages about dead workers and nodes to standard output. The engine reports the same problems itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
_PRIVATE_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes 127.0.0.1 the address of this node, on Linux too
}


class RayDied(EdjeError):
    """A process of the local Ray has ended, so the local Ray no longer works."""


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
        self._workers, self._cpus, self._gpus, self._address = workers, cpus, gpus, address
        self._stall_seconds, self._node_wait_seconds = stall_seconds, node_wait_seconds

    def run(
        self, make_worker: WorkerFactory, tasks: Iterable[Task], *, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Generator[Outcome | Notice, None, None]:
        count = self._workers or 1
        with connected_ray(self._address, cpus=count * self._cpus, gpus=count * self._gpus) as cluster:
            ray = cluster.ray
            nodes = NodeWatch(cluster, cpus=self._cpus, gpus=self._gpus, wait_seconds=self._node_wait_seconds)
            actor_class = ray.remote(
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                max_concurrency=2,  # `run` and `exchange`
                max_restarts=ATTEMPTS - 1,
                max_task_retries=-1,  # until a lost node is noticed, Ray sends the task to it again and again
            )(_WorkerActor)
            waiting = deque((task, False) for task in tasks)  # and whether another actor gave up on the task
            jobs: dict[Any, _Job] = {}  # by the reference of the actor's answer
            deadline, polled_at = float("inf"), time.monotonic()
            try:
                while (waiting or jobs) and time.monotonic() < deadline:
                    stop = deadline < float("inf")
                    if not stop and should_stop():
                        stop, deadline = True, time.monotonic() + _STOP_GRACE_SECONDS
                        waiting.clear()
                    cluster.check_alive()
                    yield from nodes.refresh()
                    starting = sum(job.task is None for job in jobs.values())
                    limit = min(self._workers or nodes.room, nodes.room)
                    for _ in range(min(limit - len(jobs), len(waiting) - starting)):
                        actor = actor_class.remote(make_worker)
                        jobs[actor.ready.remote()] = _Job(actor, None)
                    if not jobs:
                        time.sleep(_POLL_SECONDS)
                        continue
                    for answer in ray.wait([*jobs], timeout=_POLL_SECONDS)[0]:
                        job = jobs.pop(answer)
                        try:
                            if (outcome := self._outcome(ray, answer, job)) is not None:
                                yield outcome
                        except ray.exceptions.RayError:  # the actor may not start again
                            if not stop and job.task is not None:
                                waiting.appendleft((job.task, True))
                            continue
                        if waiting and len(jobs) < limit:  # else an actor of a lost node waits for this one's CPUs
                            task, again = waiting.popleft()
                            jobs[job.actor.run.remote(task)] = _Job(job.actor, task, again)
                        else:
                            ray.kill(job.actor)
                    seconds, polled_at = min(time.monotonic() - polled_at, _MAX_POLL_SECONDS), time.monotonic()
                    for answer, job in [*jobs.items()]:
                        if job.task is None:
                            if not waiting:  # in a busy cluster, an actor may start late or never
                                ray.kill(jobs.pop(answer).actor)
                            continue
                        job.exchange(ray, on_progress, stop)
                        job.stalled_seconds += seconds
                        if job.stalled_seconds > self._stall_seconds:
                            job.stalled_seconds, job.question = 0.0, None
                            yield Notice(f"a worker made no progress for {duration(self._stall_seconds)}", True)
                            ray.kill(job.actor, no_restart=False)
            except RayDied:
                if not should_stop():  # a signal to the whole process group ends Ray as well
                    raise

    def _outcome(self, ray: Any, answer: Any, job: _Job) -> Outcome | None:
        """Return the outcome of a task that has ended; None if it was stopped, or if the actor has only started.

        Raises:
            EdjeError: the worker could not be built.
            RayError: the actor may not start again, and the task may have another actor.
        """
        task = job.task
        try:
            outcome: Outcome | None = ray.get(answer)
            return outcome and dataclasses.replace(outcome, task=task)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EdjeError):  # the worker could not be built
                raise EdjeError(str(error.cause)) from error
            return TaskFailure(task, describe_error(error.cause or error), str(error))  # an unpicklable result
        except ray.exceptions.RayError as error:
            if task is None or not job.again:
                raise
            return TaskFailure(
                task,
                f"at least {ATTEMPTS + 1} worker processes died (killed, out of memory, or a crash in native code) or "
                f"made no progress for {duration(self._stall_seconds)} while running this task",
                str(error),
            )


class _WorkerActor:
    """Ray actor that runs tasks. One thread runs the tasks; another thread answers calls of `exchange`."""

    def __init__(self, make_worker: WorkerFactory) -> None:
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._progress: Any = None
        self._stop = threading.Event()

    def ready(self) -> None:
        """Return once the actor has started."""

    def run(self, task: Task) -> Outcome | None:
        self._worker = self._worker or build_worker(self._make_worker)
        self._progress = None
        outcome = run_task(self._worker, task, lambda progress: setattr(self, "_progress", progress), self._stop.is_set)
        return outcome and dataclasses.replace(outcome, task=None)  # the driver has the task already

    def exchange(self, stop: bool) -> Any:
        """Return the latest progress of the running task, or None. If `stop` is true, stop the task."""
        if stop:
            self._stop.set()
        return self._progress


@dataclasses.dataclass
class _Job:
    """What an actor does: it starts, if `task` is None, or it runs `task`.

    Attributes:
        again: True if another actor gave up on the task.
        question: pending request for the progress of the task; None if there is none.
        progress: latest progress that the worker reported.
        stalled_seconds: seconds since `progress` last changed, not counting pauses of this process.
    """

    actor: Any
    task: Task
    again: bool = False
    question: Any = None
    progress: Any = None
    stalled_seconds: float = 0.0

    def exchange(self, ray: Any, on_progress: OnProgress, stop: bool) -> None:
        """Pass the progress of a task to `on_progress`. If `stop` is True, tell the worker to stop."""
        if self.question is None:
            self.question = self.actor.exchange.options(max_task_retries=0).remote(stop)
        elif ray.wait([self.question], timeout=0)[0]:
            question, self.question = self.question, None
            with contextlib.suppress(ray.exceptions.RayError):  # Ray runs the task of a dead worker again
                progress = ray.get(question)
                if progress not in (None, self.progress):
                    self.progress, self.stalled_seconds = progress, 0.0
                    on_progress(progress)


def worker_machine() -> tuple[str, frozenset[str]]:
    """Return the id of the machine of this worker in this job, and the ids of all machines that are not lost.

    Return ("", frozenset()) outside a Ray cluster, where a lost machine takes the job with it.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or (context := ray.get_runtime_context()).namespace != _CLUSTER:
        return "", frozenset()
    job = context.get_job_id()
    alive = (node["NodeID"] for node in ray.nodes() if node["Alive"])
    return f"{job}/{context.get_node_id()}", frozenset(f"{job}/{node}" for node in alive)


class NodeWatch:
    """Watches which nodes of a cluster have room for workers. The nodes of a local Ray never change.

    Args:
        cluster: connection to Ray.
        cpus: CPUs per worker.
        gpus: GPUs per worker.
        min_workers: number of workers without which the job makes no progress.
        wait_seconds: seconds without room for `min_workers` workers after which `refresh` raises an error.

    Raises:
        UsageError: every node is too small for a worker.
    """

    def __init__(self, cluster: RayCluster, *, cpus: int, gpus: int, min_workers: int = 1, wait_seconds: float) -> None:
        self._cluster = cluster
        self._needs = {name: need for name, need in (("CPU", cpus), ("GPU", gpus)) if need}
        self._min_workers, self._wait_seconds = min_workers, wait_seconds
        self._read_at = self._had_room_at = time.monotonic()
        self._nodes = self._read()
        if self.room < 1:
            sizes = [node["Resources"] for node in self._nodes.values()]
            largest = {name: max((size.get(name, 0) for size in sizes), default=0) for name in ("CPU", "GPU")}
            raise UsageError(
                f"a worker needs {cpus} CPUs and {gpus} GPUs on one node, but the nodes of the Ray cluster "
                f"have at most {largest['CPU']:g} CPUs and {largest['GPU']:g} GPUs; add a larger node, or use "
                "fewer CPUs and GPUs per worker"
            )

    @property
    def room(self) -> int:
        """Number of workers that the nodes can run at the same time."""
        sizes = [node["Resources"] for node in self._nodes.values()]
        return sum(min(int(size.get(name, 0) // need) for name, need in self._needs.items()) for size in sizes)

    def refresh(self) -> Iterator[Notice]:
        """Look which nodes joined or left, at most every two seconds. Yield a notice for each of them.

        Raises:
            EdjeError: there has been no room for `min_workers` workers for `wait_seconds`.
        """
        if self._cluster.daemons or time.monotonic() - self._read_at < _REFRESH_SECONDS:
            return
        before, had_room = self._nodes, self.room >= self._min_workers
        self._nodes, self._read_at = self._read(), time.monotonic()
        for node_id in before.keys() ^ self._nodes.keys():
            change = "left" if node_id in before else "joined"
            address = (before | self._nodes)[node_id]["NodeManagerAddress"]
            room = f"which now has room for {counted(self.room, 'worker')}"
            yield Notice(f"node {address} {change} the cluster, {room}", is_warning=change == "left")
        wanted = counted(self._min_workers, "worker")
        if self.room >= self._min_workers:
            self._had_room_at = time.monotonic()
        elif had_room:
            waiting = f"waiting at most {duration(self._wait_seconds)} for nodes with room for {wanted}"
            yield Notice(waiting, is_warning=True)
        elif time.monotonic() - self._had_room_at > self._wait_seconds:
            raise EdjeError(
                f"for {duration(self._wait_seconds)}, the Ray cluster has had room for only {self.room} of {wanted}; "
                "add nodes to the cluster"
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        return {node["NodeID"]: node for node in self._cluster.ray.nodes() if node["Alive"]}


@dataclasses.dataclass(frozen=True)
class RayCluster:
    """A connection to Ray.

    Attributes:
        ray: the `ray` package.
        daemons: daemon processes of a local Ray; empty if this process joined a cluster.
    """

    ray: Any
    daemons: tuple[Any, ...] = ()

    def check_alive(self) -> None:
        """Raise RayDied if a process that the local Ray needs has ended."""
        # Ray itself notices this only after 15 to 60 seconds.
        import psutil

        for daemon in self.daemons:
            with contextlib.suppress(psutil.NoSuchProcess):
                name = daemon.name()
                if name in ("raylet", "gcs_server") and daemon.status() == psutil.STATUS_ZOMBIE:
                    raise RayDied(f"Ray ended during the run: its {name} process is gone")


@contextlib.contextmanager
def connected_ray(address: str | None, *, cpus: int, gpus: int) -> Iterator[RayCluster]:
    """Join the cluster at `address`, or start a local Ray with `cpus` CPUs and `gpus` GPUs if `address` is None.

    Leaving the context disconnects from the cluster, or ends the local Ray.

    Raises:
        EngineUnavailableError: the cluster cannot be joined, or Ray does not start.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment({**_ENVIRONMENT, **os.environ}))
        yield _start(stack, cpus, gpus) if address is None else _join(stack, address)


def _join(stack: contextlib.ExitStack, address: str) -> RayCluster:
    try:
        host, _, port = address.rpartition(":")
        # Without a server there, Ray would retry for minutes and then end this process.
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
        return RayCluster(_initialize(stack, address=address, namespace=_CLUSTER))
    except Exception as error:
        raise EngineUnavailableError(
            f"cannot join the Ray cluster at {address}: {describe_error(error)}; if the cluster requires "
            "a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        ) from error


def _start(stack: contextlib.ExitStack, cpus: int, gpus: int) -> RayCluster:
    _check_importable_privately()
    short = "/tmp" if os.access("/tmp", os.W_OK) else None  # a path to a Unix socket has at most 107 bytes
    parent = os.environ.get("RAY_TMPDIR", short)
    folder = stack.enter_context(
        tempfile.TemporaryDirectory(prefix=f"edje-ray-{os.getpid()}-", dir=parent, ignore_cleanup_errors=True)
    )
    # Workers import this package from any working directory.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    values = {"RAY_AUTH_TOKEN": _token(), "RAY_TMPDIR": folder, "PYTHONPATH": path}
    stack.enter_context(_environment(_PRIVATE_ENVIRONMENT | values))
    try:
        ray = _initialize(
            stack,
            address="local",  # without it, ray.init joins the cluster that RAY_ADDRESS names
            include_dashboard=False,
            object_store_memory=80 * 2**20,  # near Ray's minimum: tasks and results are small
            num_cpus=cpus,
            num_gpus=gpus,
        )
    except Exception as error:
        raise EngineUnavailableError(f"Ray did not start on this machine: {describe_error(error)}") from error
    import psutil

    arguments = ((child, child.as_dict(["cmdline"], ad_value=())["cmdline"]) for child in psutil.Process().children())
    return RayCluster(ray, tuple(child for child, words in arguments if any(folder in word for word in words)))


@functools.cache
def _check_importable_privately() -> None:
    """Raise EngineUnavailableError if Ray was imported without the settings that keep a local Ray private."""
    missing = [f"{name}={value}" for name, value in _PRIVATE_ENVIRONMENT.items() if os.environ.get(name) != value]
    if "ray" in sys.modules and missing:
        raise EngineUnavailableError(
            "this process imported Ray without the settings that keep a local Ray private; "
            f"set {' and '.join(missing)} before you import ray"
        )


@functools.cache
def _token() -> str:
    """Return the authentication token of local Ray instances. The token never changes, because Ray reads it once."""
    return secrets.token_hex(32)


def _initialize(stack: contextlib.ExitStack, **options: Any) -> Any:
    """Call `ray.init` and return the `ray` package. When `stack` is closed, Ray is shut down."""
    import ray

    stack.callback(ray.shutdown)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
    finally:
        if threading.current_thread() is threading.main_thread():  # ray.init replaces the handler there
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
