"""Connecting to Ray: start a local Ray for one run, or join a cluster that is already running.

A local Ray listens on 127.0.0.1 only, requires a random token, sends no usage statistics, and ends with the run. Ray
reads the settings for these properties at import. A program that imports Ray before this module must first set the
environment variables RAY_AUTH_MODE=token and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0.

To join a cluster, this process opens ports for the nodes of the cluster. Set RAY_AUTH_MODE=token on each node and in
this process, and keep the ports behind a firewall.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipelines.engines.base import EngineUnavailableError, describe_error
from storage_formats.errors import EdjeError, UsageError

_PROBE_SECONDS = 5.0
_OPTIONS: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL, "namespace": "edje-index"}
_LOCAL_OPTIONS: dict[str, Any] = {
    "address": "local",  # without it, ray.init joins the cluster that RAY_ADDRESS names
    "include_dashboard": False,
    "object_store_memory": 80 * 2**20,  # near Ray's minimum: tasks and results are small
}
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


@dataclass(frozen=True)
class RayCluster:
    """A connection to Ray.

    Attributes:
        ray: the `ray` package.
        daemons: daemon processes of a local Ray; empty if this process joined a cluster.
    """

    ray: Any
    daemons: tuple[Any, ...] = ()

    def room(self, *, cpus: int, gpus: int) -> int:
        """Return how many workers with `cpus` CPUs and `gpus` GPUs the cluster can run at the same time.

        Raises:
            UsageError: every node is too small for a worker.
        """
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        room = sum(room_on_node(node, cpus=cpus, gpus=gpus) for node in nodes)
        if room < 1:
            largest = {name: max((node.get(name, 0) for node in nodes), default=0) for name in ("CPU", "GPU")}
            raise UsageError(
                f"a worker needs {cpus} CPUs and {gpus} GPUs on one node, but the nodes of the Ray cluster "
                f"have at most {largest['CPU']:g} CPUs and {largest['GPU']:g} GPUs; add a larger node, or use "
                "fewer CPUs and GPUs per worker"
            )
        return room

    def check_alive(self) -> None:
        """Raise RayDied if a process that the local Ray needs has ended."""
        # Ray itself notices this only after 15 to 60 seconds.
        import psutil

        for daemon in self.daemons:
            with contextlib.suppress(psutil.NoSuchProcess):
                name = daemon.name()
                if name in ("raylet", "gcs_server") and daemon.status() == psutil.STATUS_ZOMBIE:
                    raise RayDied(f"Ray ended during the run: its {name} process is gone")


def room_on_node(resources: dict[str, float], *, cpus: int, gpus: int) -> int:
    """Return how many workers with `cpus` CPUs and `gpus` GPUs a node with `resources` can run at the same time."""
    needs = {name: need for name, need in (("CPU", cpus), ("GPU", gpus)) if need}
    return min(int(resources.get(name, 0) // need) for name, need in needs.items())


def current_node_id() -> str:
    """Return the id of the node that this worker process runs on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


@contextlib.contextmanager
def connected_ray(address: str | None, *, cpus: int, gpus: int) -> Iterator[RayCluster]:
    """Join the cluster at `address`, or start a local Ray if `address` is None.

    Leaving the context disconnects from the cluster, or ends the local Ray. `cpus` and `gpus` are the numbers of CPUs
    and GPUs of a local Ray.

    Raises:
        EngineUnavailableError: the cluster cannot be joined, or Ray does not start.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment({**_ENVIRONMENT, **os.environ}))
        yield _start(stack, cpus, gpus) if address is None else _join(stack, address)


def _join(stack: contextlib.ExitStack, address: str) -> RayCluster:
    try:
        _probe(address)
        return RayCluster(_initialize(stack, address=address))
    except Exception as error:
        raise EngineUnavailableError(
            f"cannot join the Ray cluster at {address}: {describe_error(error)}; if the cluster requires "
            "a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        ) from error


def _start(stack: contextlib.ExitStack, cpus: int, gpus: int) -> RayCluster:
    _check_importable_privately()
    folder, cleaner = stack.enter_context(_private_folder())
    values = {"RAY_AUTH_TOKEN": _token(), "RAY_TMPDIR": folder, "PYTHONPATH": _python_path()}
    stack.enter_context(_environment(_PRIVATE_ENVIRONMENT | values))
    try:
        ray = _initialize(stack, **_LOCAL_OPTIONS, num_cpus=cpus, num_gpus=gpus)
    except Exception as error:
        raise EngineUnavailableError(f"Ray did not start on this machine: {describe_error(error)}") from error
    daemons = _daemons(folder)
    agents = (agent for daemon in daemons for agent in daemon.children(recursive=True))
    print(*(process.pid for process in (*daemons, *agents)), sep="\n", file=cleaner, flush=True)
    return RayCluster(ray, daemons)


@functools.cache
def _check_importable_privately() -> None:
    """Raise EngineUnavailableError if Ray was imported without the settings that keep a local Ray private."""
    missing = [f"{name}={value}" for name, value in _PRIVATE_ENVIRONMENT.items() if os.environ.get(name) != value]
    if "ray" in sys.modules and missing:
        raise EngineUnavailableError(
            "this process imported Ray without the settings that keep a local Ray private; "
            f"set {' and '.join(missing)} before you import ray"
        )


def _initialize(stack: contextlib.ExitStack, **options: Any) -> Any:
    """Call `ray.init` and return the `ray` package. When `stack` is closed, Ray is shut down."""
    import ray

    stack.callback(ray.shutdown)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**_OPTIONS, **options)
    finally:
        if threading.current_thread() is threading.main_thread():  # ray.init replaces the handler there
            signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)
    return ray


def _probe(address: str) -> None:
    """Raise OSError if no server listens at `address`."""
    # Without this check, Ray would retry for minutes and then end this process.
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()


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


@functools.cache
def _token() -> str:
    """Return the authentication token of local Ray instances. The token never changes, because Ray reads it once."""
    return secrets.token_hex(32)


def _python_path() -> str:
    """Return a PYTHONPATH for workers that makes this package importable from any working directory."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))


# The kernel ends Ray's daemons with this process, but two agents of the daemons would go on for a minute. This shell
# kills the agents once its input ends, that is, when this process ends. It kills a process only if its command line
# contains "ray", because the process number may belong to another program by then.
_CLEAN_UP = """
while read -r pid; do pids="$pids $pid"; done
for pid in $pids; do grep -qs ray "/proc/$pid/cmdline" && kill -9 "$pid"; done
folder=$PWD; cd /
for _ in 1 2 3 4 5; do rm -rf "$folder" && exit; sleep 1; done
"""


@contextlib.contextmanager
def _private_folder() -> Iterator[tuple[str, IO[str]]]:
    """Create a folder that only this user can access. Yield the folder and a stream to write Ray's process ids to."""
    # When the context ends or this process is killed, the processes in the stream are killed and the folder is removed.
    short = "/tmp" if os.access("/tmp", os.W_OK) else None  # a path to a Unix socket has at most 107 bytes
    folder = tempfile.mkdtemp(prefix=f"edje-ray-{os.getpid()}-", dir=os.environ.get("RAY_TMPDIR", short))
    with subprocess.Popen(
        ["sh", "-c", _CLEAN_UP],
        cwd=folder,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as shell:
        assert shell.stdin is not None
        yield folder, shell.stdin


def _daemons(folder: str) -> tuple[Any, ...]:
    """Return the processes that Ray started for the session in `folder`."""
    import psutil

    return tuple(
        child
        for child in psutil.Process().children()
        if any(folder in argument for argument in child.as_dict(["cmdline"], ad_value=())["cmdline"])
    )
