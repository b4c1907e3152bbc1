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
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.engines.base import Outcome, Task, WorkerFactory, describe_error
from pipelines.engines.ray_pool import ActorPool, RayCluster
from storage_formats.errors import EdjeError, UsageError

_CLOSE_SECONDS = 20.0
_PROBE_SECONDS = 5.0
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; tasks and results are small and go round it
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
        with connected_ray(self._address, wanted) as cluster:
            pool = ActorPool(cluster, make_worker, tasks, self._needs)
            yield from pool.run(self._room(cluster), on_progress, should_stop)

    def _room(self, cluster: RayCluster) -> int:
        """Number of workers; UsageError where the cluster is too small for one."""
        total = cluster.ray.cluster_resources()
        fits = min(int(total.get(name, 0) // need) for name, need in self._needs.items() if need)
        if fits < 1:
            held = {name: total.get(name, 0) for name in self._needs}
            raise UsageError(
                f"a worker needs {self._needs['CPU']} CPUs and {self._needs['GPU']} GPUs, "
                f"the whole Ray cluster has {held['CPU']:g} and {held['GPU']:g}"
            )
        return min(self._workers or fits, fits)


@contextlib.contextmanager
def connected_ray(address: str | None, wanted: dict[str, int]) -> Iterator[RayCluster]:
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
                signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)  # ray.init puts its own in place
        stack.callback(_shut_down, ray)
        yield RayCluster(ray, node)


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
    tell = 'while read -r pid; do pids="$pids $pid"; done'
    # Killed before it could tell, while Ray was starting: the agents still write for about a minute.
    # By then a number may stand for another program: only what still calls itself Ray's is ended.
    kill = 'for pid in $pids; do case "$(ps -o args= -p $pid)" in *ray*) kill -9 $pid;; esac; done'
    end = f'if [ "$pids" ]; then {kill}; sleep 1; else sleep 90; fi; rm -rf "$0"'
    return subprocess.Popen(
        ["sh", "-c", f"pids=; {tell}; {end}", folder],
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
