"""A real service in a process of its own, on a free port of loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.command_line import command, environment

_WITH_LIMITS = """
import json, sys
from pathlib import Path
from pipelines.service.guard import Limits
from pipelines.service.server import address_of, listen, open_warm, run_service

limits = Limits(**json.loads(sys.argv[2]))
with listen("127.0.0.1", 0) as listener:
    ready = lambda: print(address_of(listener), flush=True)
    run_service(open_warm(Path(sys.argv[1])), limits, listener, ready)
"""


@dataclass
class Service:
    """A running service."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    def cpu_seconds(self):
        """Processor time that the service has used."""
        fields = (
            Path(f"/proc/{self.process.pid}/stat")
            .read_text()
            .rpartition(")")[2]
            .split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(folder, arguments, variables=None):
    log = folder / f"service-{time.monotonic_ns()}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environment(), **(variables or {})},
        )
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), log.read_text()
        yield Service(url, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        process.stdout.close()
    assert code == 0
    assert "Traceback" not in log.read_text()


@contextmanager
def serve(folder, *arguments, **variables):
    """`edje-index serve ARGUMENTS` on a free port."""
    with serving(
        folder, command("serve", *arguments, "--port", "0"), variables
    ) as service:
        yield service


@contextmanager
def serve_with(folder, index, **limits):
    """A service with limits that no option sets."""
    with serving(
        folder, [sys.executable, "-c", _WITH_LIMITS, str(index), json.dumps(limits)]
    ) as service:
        yield service


def resident_bytes(process):
    """Memory of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
