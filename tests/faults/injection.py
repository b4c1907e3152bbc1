"""Commands that meet one fault of the operating system each: the faults, and a process that runs the commands."""

from __future__ import annotations

import contextlib
import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.command_line import environment

SECONDS = 60.0
"""A command that takes longer hangs."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        kind: "error", "short" (fewer bytes than requested are moved), or "kill" (SIGKILL before the operation).
        operations: operations that can meet it; see shim.c.
        error: errno of an error.
    """

    kind: str
    operations: tuple[str, ...]
    error: int = 0


_CHANGES = ("create", "mkdir", "write", "fsync", "truncate", "rename")
_OPERATIONS = (*_CHANGES, "open", "list", "read", "unlink")
FAULTS = {
    "EIO": Fault("error", _OPERATIONS, errno.EIO),
    "ENOSPC": Fault("error", _CHANGES, errno.ENOSPC),
    "EMFILE": Fault("error", ("open", "create", "list"), errno.EMFILE),
    "ENOMEM": Fault("error", ("mmap",), errno.ENOMEM),
    "EINTR": Fault("error", ("open", "create", "read", "write", "fsync", "truncate"), errno.EINTR),
    "short": Fault("short", ("read", "write")),
    "kill": Fault("kill", (*_OPERATIONS, "mmap")),
}


@dataclass(frozen=True)
class Request:
    """A command to run. The first of `operations` below `folder` from number `at` on meets the fault."""

    arguments: list[str]
    folder: str
    log: str
    kind: str
    operations: str = ""
    error: int = 0
    at: int = 0
    seconds: float = SECONDS


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: exit code, negative for a signal; None if the command had to be killed.
        output: standard output and standard error.
        operations: "operation path" of each operation; the line "FAULT path" follows the one that met the fault.
    """

    code: int | None
    output: str
    operations: list[str]


class FaultServer:
    """Runs commands with faults. Not thread-safe. Made by `fault_server`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def load(self, arguments: list[str]) -> None:
        """Run a command in the server itself, so that later ones find its libraries loaded."""
        answer = self._ask(Request(arguments, "", str(self._log), "load"))
        assert answer["code"] == 0

    def run(self, arguments: list[str], folder: Path, fault: Fault | None = None, at: int = 0) -> Outcome:
        """Run a command, whose operations below `folder` count."""
        request = Request(arguments, str(folder), str(self._log), "count")
        if fault is not None:
            operations = f",{','.join(fault.operations)},"
            request = Request(arguments, str(folder), str(self._log), fault.kind, operations, fault.error, at)
        answer = self._ask(request)
        return Outcome(answer["code"], answer["output"], self._log.read_text(errors="replace").splitlines())

    def _ask(self, request: Request) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextlib.contextmanager
def fault_server(shim: Path, log: Path) -> Iterator[FaultServer]:
    """A server that writes the operations of a command to `log`."""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads do not survive a fork
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.fork_server", str(shim)],
        env={**environment(), **one_thread, "LD_PRELOAD": str(shim)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:  # waits for its end, which the end of its input brings
        yield FaultServer(process, log)
