"""The Ray engine: one actor a worker, on this machine or in a cluster that is already there.

The only module that imports Ray. A local Ray is private to the run: it listens on the loopback interface alone,
reports to nobody, keeps its files in a folder that is removed afterwards, and goes without the services that
nothing here uses (dashboard, autoscaler, log monitor), which halves what it costs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
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
from storage_formats.errors import EdjeError, UsageError

ATTEMPTS = 3
"""Worker processes that a task may cost before it is given up."""

_POLL_SECONDS = 1.0
_WAKE_SECONDS = 0.2  # bounds how late a stop request, or the death of Ray, is seen
_STOP_GRACE_SECONDS = 60.0  # a batch of a large model on few cores takes seconds
_CLOSE_SECONDS = 20.0
_PROBE_SECONDS = 5.0
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; tasks and results are small and go round it
_CONTROL = "control"  # group of calls that a worker answers while it is at a task
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default; without it a start warns
}
_LOCAL_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's switch for "the address of this machine is 127.0.0.1"
    "RAY_AUTH_MODE": "token",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",  # no record of tasks for a dashboard
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class RayEngine:
    """Runs tasks in Ray actors; see `pipelines.engines.base.Engine`.

    Args:
        workers: actors; None takes as many as the cluster has room for.
        cpus: CPUs of an actor.
        gpus: GPUs of an actor.
        address: head of a Ray cluster to join, "host:port"; None starts Ray on this machine.
    """

    name = "ray"

    def __init__(self, workers: int | None, *, cpus: int = 1, gpus: int = 0, address: str | None = None) -> None:
        if address is not None and not re.fullmatch(r"[^/]+:\d+", address):
            raise UsageError(f"cannot join {address}: give the address of the cluster's head as host:port")
        self._workers = workers
        self._needs = {"CPU": cpus, "GPU": gpus}
        self._address = address

    def run(
        self,
        make_worker: WorkerFactory,
        tasks: Iterable[Task],
        *,
        on_progress: Callable[[Any], None],
        should_stop: Callable[[], bool],
    ) -> Generator[Outcome, None, None]:
        wanted = {name: need * (self._workers or 1) for name, need in self._needs.items()}
        with _connected(self._address, wanted) as cluster:
            pool = _Pool(cluster, make_worker, tasks, self._needs)
            yield from pool.run(self._room(cluster), on_progress, should_stop)

    def _room(self, cluster: _Cluster) -> int:
        """Number of workers; UsageError where the cluster is too small for one."""
        total = cluster.ray.cluster_resources()
        fits = min(int(total.get(name, 0) // need) for name, need in self._needs.items() if need)
        if fits < 1:
            held = {name: total.get(name, 0) for name in self._needs}
            raise UsageError(
                f"a worker needs {self._needs['CPU']} CPUs and {self._needs['GPU']} GPUs, "
                f"the whole Ray cluster has {held['CPU']:g} and {held['GPU']:g}"
            )
        return self._workers or fits


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


class _Pool:
    """The actors of one run: each has one task at a time, and no more tasks are taken than there are actors."""

    def __init__(
        self, cluster: _Cluster, make_worker: WorkerFactory, tasks: Iterable[Task], needs: dict[str, int]
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
            except _RayDied as error:
                if should_stop():  # a signal to the whole process group ends Ray as well
                    return
                raise EdjeError(f"{error}; what is finished is kept") from error
            if time.monotonic() > next_poll:
                self._poll()
                next_poll = time.monotonic() + _POLL_SECONDS
        with contextlib.suppress(_RayDied):
            yield from self._wind_down(on_progress)

    def _hand_out(self, workers: int) -> None:
        """Give every free worker a task, and start workers as long as there are tasks for them."""
        while True:
            slot = next((slot for slot in self._slots if slot.work is None), None)
            if slot is None and len(self._slots) >= workers:
                return
            work = self._next_work()
            if work is None:
                return
            if slot is None:
                slot = _Slot(self._actor.remote(self._make_worker))
                self._slots.append(slot)
            slot.work, slot.call = work, slot.actor.run.remote(work.task)

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
        slot.work = slot.call = None
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


class _RayDied(Exception):
    """A process that a local Ray cannot do without has ended."""


@dataclass(frozen=True)
class _Cluster:
    """A connection to Ray; `node` holds the processes of a Ray that was started for this run."""

    ray: Any
    node: Any = None

    def check_alive(self) -> None:
        """Ray itself may need minutes to see this, or end this process."""
        if self.node is not None and (dead := self.node.dead_processes()):
            raise _RayDied(f"Ray ended in mid-run (its {dead[0][0]} process is gone)")


@contextlib.contextmanager
def _connected(address: str | None, wanted: dict[str, int]) -> Iterator[_Cluster]:
    """Ray at `address`, or a Ray of this run's own that ends with the context."""
    for name, value in {**_ENVIRONMENT, **({} if address else _LOCAL_ENVIRONMENT)}.items():
        os.environ.setdefault(name, value)
    import ray

    # Ray writes what befell its processes to standard output, where results belong; outcomes tell it here.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    on_sigterm = signal.getsignal(signal.SIGTERM)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL, "namespace": "edje-index"}
    with contextlib.ExitStack() as stack:
        try:
            if address is None:
                node = stack.enter_context(_local_node(wanted))
                ray.init(address=node.address, **options)
            else:
                node = None
                _probe(address)
                ray.init(address=address, **options)
        except Exception as error:
            raise EdjeError(_not_connected(address, error)) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)  # ray.init puts its own in place
        stack.callback(_shut_down, ray)
        yield _Cluster(ray, node)


@contextlib.contextmanager
def _local_node(wanted: dict[str, int]) -> Iterator[Any]:
    """The processes of a Ray with the resources `wanted`, without the services that a build does not need."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):
        def start_api_server(self, **_: Any) -> None:
            """Not started: it serves the dashboard and job submission."""

    folder = tempfile.mkdtemp(prefix=f"edje-ray-{os.getpid()}-", dir="/tmp" if os.access("/tmp", os.W_OK) else None)
    params: dict[str, Any] = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": wanted["CPU"],
        "num_gpus": wanted["GPU"],
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
        "temp_dir": folder,
    }
    watchdog = _start_watchdog(folder)
    with _python_path():
        # The kernel ends these processes together with this one (PR_SET_PDEATHSIG), however it ends.
        node = LeanNode(
            RayParams(**params), head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True
        )
    try:
        agents = _family(node)
        watchdog.stdin.write("".join(f"{process.pid}\n" for process in agents))
        watchdog.stdin.flush()
        yield node
    finally:
        _end_processes(node, agents)
        shutil.rmtree(folder, ignore_errors=True)
        watchdog.kill()
        watchdog.communicate()


def _family(node: Any) -> list[Any]:
    """The processes that Ray's processes have started."""
    import psutil

    found = []
    for info in itertools.chain.from_iterable(node.all_processes.values()):
        with contextlib.suppress(psutil.Error):
            found += psutil.Process(info.process.pid).children(recursive=True)
    return found


def _end_processes(node: Any, agents: list[Any]) -> None:
    """End Ray's processes and those that they have started; the agents would go on by themselves for a minute."""
    import psutil

    family = [*agents, *_family(node)]
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(family, timeout=_CLOSE_SECONDS)


def _start_watchdog(folder: str) -> Any:
    """A shell that, when this process is gone, ends the processes it was told of and removes `folder`.

    It learns of that by the end of the pipe that is its input. Ray's own processes are ended by the kernel then, and
    the workers by themselves; the agents would go on for a minute.
    """
    script = 'pids=; while read -r pid; do pids="$pids $pid"; done; kill -9 $pids; sleep 1; rm -rf "$0"'
    return subprocess.Popen(
        ["sh", "-c", script, folder],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def _python_path() -> Iterator[None]:
    """Processes started within find this package, installed or not, whatever their folder."""
    before = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _not_connected(address: str | None, error: Exception) -> str:
    if address is None:
        return f"Ray did not start on this machine: {describe_error(error)}; '--engine inline' works without it"
    return (
        f"cannot join the Ray cluster at {address}: {describe_error(error)}; "
        "a cluster that asks for a token needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or ~/.ray/auth_token"
    )


def _probe(address: str) -> None:
    """OSError unless something listens at `address`: Ray would try for minutes, and then end this process."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()


def _shut_down(ray: Any) -> None:
    """Disconnect; waits a bounded time, because with its processes gone Ray may not come back."""
    thread = threading.Thread(target=ray.shutdown, daemon=True)
    thread.start()
    thread.join(_CLOSE_SECONDS)
