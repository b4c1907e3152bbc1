"""A Ray cluster of several raylets on this machine, whose nodes start, leave and
die as separate processes.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.conftest import REPO

START_SECONDS = 240


class RayNodes:
    """Each node has a loopback address and a process group of its own. The head runs no
    workers.

    Attributes:
        address: address of the head, "host:port".
        environment: environment of the nodes, and of a driver that joins them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(REPO),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start_head(self) -> None:
        """Start the head, and wait until it is ready."""
        self._start(
            1,
            [
                "--head",
                f"--port={self.address.rpartition(':')[2]}",
                "--include-dashboard=false",
                "--num-cpus=0",
                "--num-gpus=0",
            ],
        )

    def add(
        self, number: int, cpus: int = 1, hidden: Path | None = None, gpus: int = 0
    ) -> None:
        """Start the node with the address 127.0.0.`number`. The node sees an empty
        directory in place of `hidden`, and says that it has `gpus` GPUs.
        """
        view = []
        if hidden is not None:
            mount = f'mount -t tmpfs none {shlex.quote(str(hidden))} && exec "$@"'
            view = ["unshare", "--mount", "sh", "-c", mount, "sh"]
        sizes = [f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
        self._start(number, [f"--address={self.address}", *sizes], view)

    def _start(self, number: int, options: list[str], view: Sequence[str] = ()) -> None:
        """Start a node. `view` is a command that gives it another view of the file
        system.
        """
        options = [
            *options,
            f"--node-ip-address=127.0.0.{number}",
            f"--object-store-memory={80 * 2**20}",
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]
        log = self._folder / f"node-{number}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [
                    *view,
                    sys.executable,
                    "-m",
                    "ray.scripts.scripts",
                    "start",
                    "--block",
                    *options,
                ],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[number] = process
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def _raylet(self, number: int) -> psutil.Process | None:
        children = psutil.Process(self._processes[number].pid).children(recursive=True)
        return next((child for child in children if child.name() == "raylet"), None)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the nodes that were not killed, without the head."""
        return [number for number in self._processes if number != 1]

    def workers(self, number: int) -> list[psutil.Process]:
        """Return the processes of this project's workers on a node."""
        workers = []
        for child in psutil.Process(self._processes[number].pid).children(
            recursive=True
        ):
            with contextlib.suppress(psutil.Error):
                if "ray::EdjeWorker" in " ".join(child.cmdline()[:1]):
                    workers.append(child)
        return workers

    def stop(self, number: int) -> None:
        """Remove a node in the way of `ray stop`."""
        raylet = self._raylet(number)
        assert raylet is not None
        raylet.send_signal(signal.SIGTERM)
        raylet.wait(timeout=60)
        self.kill(number)

    def kill(self, number: int) -> None:
        """Kill the raylet of a node and all processes around it, as if the machine
        were gone.
        """
        starter = self._processes.pop(number)
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(starter.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        starter.kill()
        starter.wait(timeout=60)

    def remove_all(self) -> None:
        """Remove all nodes except the head."""
        for number in self.numbers:
            self.stop(number)

    def kill_all(self) -> None:
        for number in [*self._processes]:
            self.kill(number)
        # children of a node that failed while it started
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR") == str(self._folder):
                    process.kill()


@contextlib.contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Start the head of a cluster. All nodes die when the context ends."""
    folder = Path(tempfile.mkdtemp(prefix="ray-nodes-", dir="/tmp"))
    nodes = RayNodes(folder)
    try:
        nodes.start_head()
        yield nodes
    finally:
        nodes.kill_all()
        shutil.rmtree(folder, ignore_errors=True)
