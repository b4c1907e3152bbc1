"""Runs tasks in Ray actors. The actors run on a local Ray, which this module starts, or
on a Ray cluster, which this module joins. Training on several workers also connects to
Ray through this module.

A local Ray listens on 127.0.0.1 only, requires a random token, sends no usage
statistics, and ends with the run. Ray reads the settings for these properties when it
is imported, and this module sets them before it imports Ray. A program that imports Ray
itself must first set the environment variables RAY_AUTH_MODE=token and
RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0.

To join a cluster, this process opens ports for the nodes of the cluster. Set
RAY_AUTH_MODE=token on each node and in this process, and keep the ports behind a
firewall.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import math
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
from collections.abc import (
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from pathlib import Path
from typing import Any, Literal

import pipelines
from pipelines.engines.base import (
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
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage, never
from pipelines.progress.wording import counted, duration
from storage_formats.errors import EdjeError, UsageError
from storage_formats.launch import are_packages_hidden

ATTEMPTS = 3
"""Largest number of attempts at a task. If this number of workers have died or stalled
while they ran the task, the task fails.
"""

STALL_SECONDS = 600.0
"""A worker that makes no progress for this time is replaced. The time is long, because
one batch of a large model takes minutes on few cores.
"""

NODE_WAIT_SECONDS = 600.0
"""If the cluster has no room for the workers for this time, the job ends with an
error.
"""

_POLL_SECONDS = 0.5
# Largest number of requests for progress per second. A request takes about 0.4 ms of
# CPU time.
_QUESTIONS_PER_SECOND = 200
# If this number of workers in a row die while they start, the run ends with an error.
_MAX_FAILED_STARTS = 20
# If no task runs for this time, the engine reports that it waits.
_BUSY_SECONDS = 15.0
# Ray counts resources in units of 0.0001.
_ROUNDING = 1e-4
_REFRESH_SECONDS = 2.0
_PROBE_SECONDS = 5.0

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray prints a warning if this variable is not set.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray prints messages about dead workers and nodes to standard output. The engine
    # reports the same problems itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    # By default, Ray runs workers with nice 15, so that they wait for every other
    # program of the machine.
    "RAY_worker_niceness": "0",
}
# The token of every local Ray of this process. Ray reads a token only once per process.
_TOKEN = secrets.token_hex(32)
_PRIVATE_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    # With this value, the address of this node is 127.0.0.1, on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


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
) -> Generator[Any, None, None]:
    """Run every task in a Ray actor, and yield the results in the order in which the
    tasks end. See `run_inline` for the errors.

    Args:
        make_worker, tasks, on_progress, on_event, should_stop: see `run_inline`.
        workers: largest number of actors; None starts as many actors as the cluster can
            run at the same time. Nodes that join during the run get actors, too.
        cpus: number of CPUs that Ray reserves for each actor.
        gpus: number or fraction of GPUs that Ray reserves for each actor.
        address: address "host:port" of the head of a Ray cluster to join. "auto" finds
            the cluster that the variable RAY_ADDRESS names or that runs on this
            machine. None starts a local Ray.
        lock: lock file of the index, which contains the name of this process. Before
            its first task, each actor checks that its machine sees the same file under
            the same path, because the workers write to this index. None checks nothing.
    """
    if lock is not None:
        make_worker = functools.partial(
            _worker_at, lock, lock.read_bytes(), make_worker
        )
    with (
        connected_ray(address, workers=workers or 1, cpus=cpus, gpus=gpus) as cluster,
        contextlib.ExitStack() as end,
    ):
        ray = cluster.ray

        def warn(text: str) -> None:
            on_event(StatusMessage(text, is_warning=True))

        # An actor has two threads: one runs a task, the other answers `progress`.
        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=2)
        actor_class = remote(EdjeWorker)
        # tasks that no actor runs, each with its number of attempts
        waiting = deque((task, 0) for task in tasks)
        # what each actor does, by Ray's reference to the answer of the actor
        jobs: dict[Any, _Job] = {}
        # number of actors that died before they started, since an actor last started
        failed_starts = 0
        waits_since = asked_at = time.monotonic()

        @end.callback
        def kill_actors() -> None:
            for job in jobs.values():
                ray.kill(job.actor)

        while waiting or any(job.attempt for job in jobs.values()):
            if should_stop():
                return
            cluster.refresh(on_event)
            # Ray places new actors as soon as there is room. Without a number of
            # workers, as many start at a time as run already, so that few wait.
            running = sum(job.attempt > 0 for job in jobs.values())
            limit = min(workers or max(1, 2 * running), running + len(waiting))
            for _ in range(len(jobs), limit):
                actor = actor_class.remote(make_worker)
                jobs[actor.node.remote()] = _Job(actor)
            if running:
                waits_since = time.monotonic()
            elif time.monotonic() - waits_since > _BUSY_SECONDS:
                waits_since = float("inf")
                warn("waiting for free CPUs and GPUs in the Ray cluster")
            # Ask rarely enough that this process is idle most of the time.
            pause = max(_POLL_SECONDS, len(jobs) / _QUESTIONS_PER_SECOND)
            if time.monotonic() - asked_at >= pause:
                asked_at = time.monotonic()
                for job in jobs.values():
                    job.stalled_seconds += pause if job.attempt else 0
                    question = job.question
                    if question is None or ray.wait([question], timeout=0)[0]:
                        # If the actor has died, the answer to its task says so, too.
                        with contextlib.suppress(ray.exceptions.RayError):
                            progress = question and ray.get(question)
                            if progress not in (None, job.progress):
                                job.progress = progress
                                job.stalled_seconds = 0.0
                                on_progress(progress)
                        job.question = job.actor.progress.remote()
                    if job.stalled_seconds > STALL_SECONDS:
                        job.stalled_seconds = 0.0
                        warn(
                            "a worker made no progress for"
                            f" {duration(STALL_SECONDS)}{cluster.place(job.node)}"
                        )
                        ray.kill(job.actor)
            for answer in ray.wait([*jobs], timeout=_POLL_SECONDS)[0]:
                job = jobs.pop(answer)
                place = cluster.place(job.node)
                try:
                    result = ray.get(answer)
                except ray.exceptions.RayTaskError as error:
                    # A task and the start of a worker raise EdjeErrors. Another error
                    # comes from Ray, for example because a result cannot be pickled.
                    if isinstance(error.cause, EdjeError) and not place:
                        raise error.cause from error
                    message = f"{describe_error(error.cause or error)}{place}"
                    raise TaskFailedError(message, job.task) from error
                except ray.exceptions.RayError as error:
                    if not job.attempt:
                        # The actor died while it started, perhaps on a lost node that
                        # Ray has not noticed yet.
                        failed_starts += 1
                        if failed_starts == _MAX_FAILED_STARTS:
                            raise EdjeError(
                                "worker processes die while they start:"
                                f" {describe_error(error)}"
                            ) from error
                        continue
                    if job.attempt == ATTEMPTS:
                        raise TaskFailedError(
                            f"{ATTEMPTS} worker processes died (killed, out of memory,"
                            " or a crash in native code) or made no progress for"
                            f" {duration(STALL_SECONDS)} while running this task",
                            job.task,
                        ) from error
                    warn(
                        f"a worker died{place}; its task runs again (attempt"
                        f" {job.attempt + 1} of {ATTEMPTS})"
                    )
                    waiting.appendleft((job.task, job.attempt))
                    continue
                if job.attempt:
                    yield result
                else:
                    job.node = result
                    failed_starts = 0
                if waiting:
                    task, attempts = waiting.popleft()
                    answer = job.actor.run.remote(task)
                    jobs[answer] = _Job(job.actor, task, attempts + 1, job.node)
                else:
                    ray.kill(job.actor)


def _worker_at(lock: Path, content: bytes, make_worker: WorkerFactory) -> Worker:
    """Return a worker, if this machine sees the file `lock` with `content`."""
    if not lock.exists() or lock.read_bytes() != content:
        raise EdjeError(
            f"the machine {socket.gethostname()} does not see the index directory"
            f" {lock.parents[1]} of this job; put the index into a directory that all"
            " machines share under the same path"
        )
    return make_worker()


class EdjeWorker:
    """Ray actor that runs tasks. The name of the class is visible to users: Ray names
    the process of the actor after it.
    """

    def __init__(self, make_worker: WorkerFactory) -> None:
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._progress: Any = None

    def node(self) -> str:
        """Return the id of the node of this actor. Ray answers this call once the actor
        has started.
        """
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, task: Task) -> Any:
        """Run `task`, and return its result.

        Raises:
            TaskFailedError: the task failed.
            EdjeError: the worker cannot start.
        """
        if self._worker is None:
            self._worker = build_worker(self._make_worker)
        self._progress = None
        return run_task(self._worker, task, self._report, never)

    def progress(self) -> Any:
        """Return the latest progress of the task; None if it has reported none."""
        return self._progress

    def _report(self, progress: Any) -> None:
        self._progress = progress


@dataclasses.dataclass
class _Job:
    """What an actor does. Without an attempt, the actor is starting. Otherwise it runs
    `task`.

    Attributes:
        attempt: number of times that `task` was given to a worker.
        node: id of the node of the actor; empty until the actor has started.
        question: pending request for the progress of the task; None if there is none.
        progress: latest progress of the task.
        stalled_seconds: seconds since `progress` last changed. While this process is
            paused (Ctrl-Z), it does not see progress, so pauses do not count.
    """

    actor: Any
    task: Task = None
    attempt: int = 0
    node: str = ""
    question: Any = None
    progress: Any = None
    stalled_seconds: float = 0.0


@dataclasses.dataclass
class RayCluster:
    """A connection to Ray. It watches the nodes of a cluster, or the processes of a
    local Ray.

    Args:
        ray: the `ray` package, which is connected.
        cpus: number of CPUs that each worker needs.
        gpus: number of GPUs that each worker needs.
        min_workers: number of workers that the job needs at least.
        daemons: daemon processes of a local Ray; empty if this process joined a
            cluster.

    Raises:
        UsageError: the nodes have no room for `min_workers` workers.
    """

    ray: Any
    cpus: int
    gpus: float
    min_workers: int
    daemons: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self._read_at = self._had_room_at = time.monotonic()
        self._nodes = self._read()
        if self.room < self.min_workers:
            raise UsageError(
                f"a worker needs {self.cpus} CPUs and {self.gpus:g} GPUs on one node,"
                f" but the nodes of the Ray cluster have room for only {self.room} of"
                f" {counted(self.min_workers, 'worker')}; add nodes, or use fewer or"
                " smaller workers, or another device"
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    @property
    def room(self) -> int:
        """Number of workers for which the nodes have room if they do nothing else."""
        needs = {"CPU": self.cpus, "GPU": self.gpus}
        # A division of floats would find room for only four workers with 0.2 GPUs each
        # on a GPU.
        return sum(
            min(
                int(node["Resources"].get(name, 0) / need + _ROUNDING)
                for name, need in needs.items()
                if need
            )
            for node in self._nodes.values()
        )

    def place(self, node_id: str) -> str:
        """Return the text " on node ADDRESS" for a message. Return "" for a local Ray
        or an unknown node.
        """
        node = self._nodes.get(node_id)
        if self.daemons or node is None:
            return ""
        return f" on node {node['NodeManagerAddress']}"

    def refresh(self, on_event: OnEvent) -> None:
        """Check the processes of a local Ray. For a cluster, read the list of nodes, at
        most every two seconds, and report each node that has joined or left.

        Raises:
            EdjeError: a process that the local Ray needs has ended, which Ray itself
                notices after 15 to 60 seconds; or there has been no room for
                `min_workers` workers for `NODE_WAIT_SECONDS`.
        """
        import psutil

        for daemon in self.daemons:
            if daemon.status() == psutil.STATUS_ZOMBIE:
                raise EdjeError(
                    f"Ray ended during the run: its {daemon.name()} process is gone"
                )
        if self.daemons or time.monotonic() - self._read_at < _REFRESH_SECONDS:
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
        if self.room >= self.min_workers:
            self._had_room_at = time.monotonic()
        elif time.monotonic() - self._had_room_at > NODE_WAIT_SECONDS:
            raise EdjeError(
                f"for {duration(NODE_WAIT_SECONDS)}, the Ray cluster has had room for"
                f" only {self.room} of {counted(self.min_workers, 'worker')}; add"
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
) -> Iterator[RayCluster]:
    """Context manager that joins the cluster at `address`. If `address` is None, it
    starts a local Ray for `workers` workers.

    At the end of the context, this process leaves the cluster, or the local Ray ends.
    See `RayCluster` for the other arguments.

    Raises:
        EngineUnavailableError: the cluster cannot be joined, or Ray does not start.
        UsageError: the nodes of the cluster have no room for the workers.
    """
    check_ray(address)
    settings = (cpus, gpus, min_workers)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment({**_ENVIRONMENT, **os.environ}))
        if address is not None:
            try:
                ray = _initialize(stack, address=address)
            except Exception as error:
                raise _cannot_join(address, error) from error
            yield RayCluster(ray, *settings)
            return
        _check_importable_privately()
        # Ray puts sockets into the folder, and the path of a socket has at most 107
        # bytes. So prefer a parent with a short path.
        short = "/tmp" if os.access("/tmp", os.W_OK) else None
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix=f"edje-ray-{os.getpid()}-",
                dir=os.environ.get("RAY_TMPDIR", short),
                ignore_cleanup_errors=True,
            )
        )
        # The workers must find this package, whatever the working directory is.
        path = os.pathsep.join(
            filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
        )
        values = {"RAY_AUTH_TOKEN": _TOKEN, "RAY_TMPDIR": folder, "PYTHONPATH": path}
        stack.enter_context(_environment(_PRIVATE_ENVIRONMENT | values))
        try:
            ray = _initialize(
                stack,
                # Without this address, `ray.init` would join the cluster that the
                # variable RAY_ADDRESS names.
                address="local",
                include_dashboard=False,
                # This size in bytes is a little more than Ray's minimum. It suffices,
                # because tasks and results are small.
                object_store_memory=80 * 2**20,
                num_cpus=workers * cpus,
                num_gpus=math.ceil(workers * gpus),
            )
        except Exception as error:
            raise EngineUnavailableError(
                f"Ray did not start on this machine: {describe_error(error)}"
            ) from error
        import psutil

        daemons = [
            child
            for child in psutil.Process().children()
            if child.name() in ("raylet", "gcs_server")
        ]
        yield RayCluster(ray, *settings, daemons)


def best_device(address: str | None) -> Literal["cpu", "cuda"]:
    """Return "cuda" if this machine or a node of the Ray cluster at `address` has a
    GPU, else "cpu".
    """
    gpus = cuda_devices()
    if address is not None and not gpus:
        with connected_ray(address, workers=1, cpus=1, gpus=0) as cluster:
            gpus = cluster.ray.cluster_resources().get("GPU", 0)
    return "cuda" if gpus else "cpu"


def check_ray(address: str | None) -> None:
    """Check that Ray is installed. If `address` has the form host:port, also check that
    a server answers there. Ray itself would retry for minutes and then end this
    process.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        UsageError: `address` is neither None, nor "auto", nor of the form host:port.
        EngineUnavailableError: no server answers.
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
        # OverflowError: the port number is too large. ValueError: the host name or the
        # port has too many characters.
        raise _cannot_join(address, error) from error


def _cannot_join(address: str, error: Exception) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"cannot join the Ray cluster at {address}: {describe_error(error)}; if the"
        " cluster requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
    )


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
    """Call `ray.init` with `options`, and return the `ray` package. When `stack` is
    closed, Ray is shut down.
    """
    import ray

    stack.callback(ray.shutdown)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        # Ray puts these directories of this process first in the search path of a
        # worker, after the worker has called the hook. A worker with a hook starts
        # later, so the hook is used only if it is needed.
        first = [os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))]
        hook = None
        if len(pipelines.__path__) > 1 or are_packages_hidden(first):
            hook = {"worker_process_setup_hook": "storage_formats.launch.share_package"}
        ray.init(
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            runtime_env=hook,
            **options,
        )
    finally:
        # In the main thread, `ray.init` replaces the handler of SIGTERM. Restore it.
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
