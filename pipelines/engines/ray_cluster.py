"""Connecting to Ray: start a local Ray for one run, or join a cluster that is already running.

A local Ray is private to the run. It listens on 127.0.0.1 only, asks every client for a random token, sends no usage
statistics, and keeps its files in a folder that only this user can enter. Its processes end and its folder is removed
with the run, even if this process is killed.

Ray reads the setting that keeps it on 127.0.0.1 when it is first imported. A program that imports Ray earlier must
set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before that import; otherwise the local Ray listens on every network interface,
protected by the token alone. A cluster that is joined listens where its own `ray start` put it. Set
RAY_AUTH_MODE=token on each of its nodes and in this process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.engines.base import EngineUnavailableError, describe_error
from storage_formats.errors import EdjeError, UsageError

_SHUTDOWN_SECONDS = 20.0
_PROBE_SECONDS = 5.0
_OPTIONS: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL, "namespace": "edje-index"}
_LOCAL_OPTIONS: dict[str, Any] = {
    "address": "local",  # without it, ray.init joins the cluster that RAY_ADDRESS names
    "include_dashboard": False,
    "object_store_memory": 80 * 2**20,  # near Ray's minimum: tasks and results are too small for the object store
}
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns if it is not set
}
_LOCAL_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes 127.0.0.1 the address of this node, on Linux too
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_task_events_report_interval_ms": "0",  # only a dashboard reads task events
}


class RayDied(EdjeError):
    """The local Ray has lost a process that it cannot work without."""


@dataclass(frozen=True)
class RayCluster:
    """A connection to Ray.

    Attributes:
        ray: the imported package.
        processes: the processes of a local Ray except its workers; empty for a cluster that was joined.
    """

    ray: Any
    processes: tuple[Any, ...] = ()

    def room(self, *, cpus: int, gpus: int) -> int:
        """Number of workers with `cpus` and `gpus` each that the cluster's nodes can hold at once.

        Raises:
            UsageError: no node can hold even one.
        """
        needs = {name: need for name, need in (("CPU", cpus), ("GPU", gpus)) if need}
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        room = sum(min(int(node.get(name, 0) // need) for name, need in needs.items()) for node in nodes)
        if room < 1:
            largest = {name: max((node.get(name, 0) for node in nodes), default=0) for name in ("CPU", "GPU")}
            raise UsageError(
                f"a worker needs {cpus} CPUs and {gpus} GPUs on one node of the Ray cluster; "
                f"its nodes have at most {largest['CPU']:g} CPUs and {largest['GPU']:g} GPUs"
            )
        return room

    def check_alive(self) -> None:
        """Raise RayDied if the local Ray cannot go on; Ray itself notices this only after 15 to 60 seconds."""
        import psutil

        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                name = process.name()
                if name in ("raylet", "gcs_server") and process.status() == psutil.STATUS_ZOMBIE:
                    raise RayDied(f"Ray ended during the run: its {name} process is gone; finished work is kept")


@contextlib.contextmanager
def connected_ray(address: str | None, *, cpus: int, gpus: int) -> Iterator[RayCluster]:
    """Join the cluster at `address`, or start a local Ray with `cpus` and `gpus` that ends with the context.

    Raises:
        EngineUnavailableError: the cluster cannot be joined, or Ray does not start.
    """
    with contextlib.ExitStack() as stack:
        if address is not None:
            stack.enter_context(_environment(_ENVIRONMENT))
            yield RayCluster(_initialize(stack, address, {"address": address}))
            return
        session = _Session()
        stack.callback(session.end)
        token = {"RAY_AUTH_TOKEN": _token(), **_LOCAL_ENVIRONMENT}
        stack.enter_context(_environment(_ENVIRONMENT | token, RAY_TMPDIR=session.folder, PYTHONPATH=_python_path()))
        ray = _initialize(stack, None, {**_LOCAL_OPTIONS, "num_cpus": cpus, "num_gpus": gpus})
        yield RayCluster(ray, session.watch())


def _initialize(stack: contextlib.ExitStack, address: str | None, options: dict[str, Any]) -> Any:
    """Call `ray.init`; `stack` shuts Ray down."""
    import ray

    stack.callback(_shut_down, ray)
    _silence_error_listener(stack, ray)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address is not None:
            _probe(address)
        ray.init(**_OPTIONS, **options)
    except Exception as error:
        raise EngineUnavailableError(_explain(address, error)) from error
    finally:
        if threading.current_thread() is threading.main_thread():  # ray.init replaces the handler there
            signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)
    return ray


def _silence_error_listener(stack: contextlib.ExitStack, ray: Any) -> None:
    """Keep Ray from printing errors of its processes to standard output, where a command prints its result.

    The only use of a private name of Ray: no public setting turns these messages off (versions 2.52 to 2.60). In a
    version without that name, the messages appear and everything else works.
    """
    module: Any = getattr(getattr(ray, "_private", None), "worker", None)
    printer = getattr(module, "print_to_stdstream", None)
    if printer is not None:
        stack.callback(setattr, module, "print_to_stdstream", printer)
        module.print_to_stdstream = lambda *_, **__: None


def _probe(address: str) -> None:
    """Raise OSError unless something listens at `address`: Ray tries for minutes and then ends this process."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()


def _explain(address: str | None, error: Exception) -> str:
    if address is None:
        return f"Ray did not start on this machine: {describe_error(error)}"
    return (
        f"cannot join the Ray cluster at {address}: {describe_error(error)}; "
        "if the cluster asks for a token, set RAY_AUTH_MODE=token and either RAY_AUTH_TOKEN or ~/.ray/auth_token"
    )


def _shut_down(ray: Any) -> None:
    """Disconnect, and wait a limited time: `ray.shutdown` may never return after Ray's processes are gone."""
    thread = threading.Thread(target=ray.shutdown, daemon=True)
    thread.start()
    thread.join(_SHUTDOWN_SECONDS)


@contextlib.contextmanager
def _environment(defaults: dict[str, str], **values: str) -> Iterator[None]:
    """Set environment variables within the context; a variable of `defaults` that the user has set stays as it is."""
    before = dict(os.environ)
    os.environ.update({**defaults, **before, **values})
    try:
        yield
    finally:
        for name in {*defaults, *values}:
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})


@functools.cache
def _token() -> str:
    """One token per process, because Ray reads it only once."""
    return secrets.token_hex(32)


def _python_path() -> str:
    """PYTHONPATH with which worker processes find this package, installed or not, in any working directory."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))


class _Session:
    """The folder and the processes of a local Ray, and a watchdog that ends both if this process is killed.

    The kernel ends the processes that Ray starts directly, and workers end by themselves. Ray's two agents would go
    on for a minute.
    """

    # The input of the shell ends with this process. A process number may belong to another program by then.
    _WATCHDOG = (
        'pids=; while read -r pid; do pids="$pids $pid"; done; '
        'for pid in $pids; do grep -qs ray "/proc/$pid/cmdline" && kill -9 "$pid"; done; sleep 1; rm -rf "$0"'
    )

    def __init__(self) -> None:
        short = "/tmp" if os.access("/tmp", os.W_OK) else None  # a path to a Unix socket has at most 107 bytes
        self.folder = tempfile.mkdtemp(prefix=f"edje-ray-{os.getpid()}-", dir=os.environ.get("RAY_TMPDIR", short))
        self._processes: tuple[Any, ...] = ()
        self._watchdog = subprocess.Popen(
            ["sh", "-c", self._WATCHDOG, self.folder], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def watch(self) -> tuple[Any, ...]:
        """Tell the watchdog about the processes of Ray that run now, and return them."""
        import psutil

        daemons = [process for process in psutil.Process().children() if self.folder in " ".join(process.cmdline())]
        self._processes = (*daemons, *(child for daemon in daemons for child in daemon.children(recursive=True)))
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write("".join(f"{process.pid}\n" for process in self._processes))
        self._watchdog.stdin.flush()
        return self._processes

    def end(self) -> None:
        """End what `ray.shutdown` has left, and remove the folder."""
        import psutil

        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(self._processes, timeout=_SHUTDOWN_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._watchdog.kill()
        self._watchdog.communicate()
