"""Commands that meet one fault of the operating system each: the requests, and the process that serves them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.command_line import environment

SECONDS = 60.0
ALL = ("open", "create", "read", "write", "fsync", "truncate", "mmap", "rename", "unlink")


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        kind: "error", "short" (fewer bytes than requested are moved) or "kill" (SIGKILL before the operation).
        error: errno of an error.
        operations: operations that it strikes; see shim.c.
    """

    kind: str
    error: int
    operations: tuple[str, ...]


FAULTS = {
    "EIO": Fault("error", errno.EIO, tuple(name for name in ALL if name != "mmap")),
    "ENOSPC": Fault("error", errno.ENOSPC, ("create", "write", "fsync", "truncate", "rename")),
    "EMFILE": Fault("error", errno.EMFILE, ("open", "create")),
    "ENOMEM": Fault("error", errno.ENOMEM, ("mmap", "open", "read")),
    "EINTR": Fault("error", errno.EINTR, ("open", "create", "read", "write", "fsync", "truncate")),
    "short": Fault("short", 0, ("read", "write")),
    "kill": Fault("kill", 0, ALL),
}


@dataclass(frozen=True)
class Request:
    """A command to run. The first operation of the kind below `folder` from number `at` on meets the fault."""

    arguments: list[str]
    folder: str
    log: str
    kind: str = "count"
    error: int = 0
    operations: str = ""
    at: int = 0
    seconds: float = SECONDS


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: exit code, negative for a signal; None if the command had to be killed.
        output: standard output and standard error.
        operations: "operation path" of each operation; the line "FAULT path" stands after the one that met the fault.
    """

    code: int | None
    output: str
    operations: list[str]


def compile_shim(folder: Path) -> Path | None:
    """The library in `folder`; None if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, library = Path(__file__).with_name("shim.c"), folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


class FaultServer:
    """Runs commands with faults. Use `start`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    @contextmanager
    def start(cls, shim: Path, log: Path) -> Iterator[FaultServer]:
        """A server; `log` is a file for the operations of its commands."""
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads do not survive a fork
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fork_server", str(shim)],
            env={**environment(), **one_thread, "LD_PRELOAD": str(shim), "COLUMNS": "10000"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            yield cls(process, log)
            assert process.stdin is not None
            process.stdin.close()

    def load(self, *arguments: str | Path) -> None:
        """Run a command in the server itself, so that later commands find its libraries loaded."""
        self._ask(Request(list(map(str, arguments)), "", str(self._log), "load"))

    def run(self, folder: Path, *arguments: str | Path, fault: Fault | None = None, at: int = 0) -> Outcome:
        """Run a command that meets `fault`. Operations below `folder` count."""
        request = Request(list(map(str, arguments)), str(folder), str(self._log))
        if fault is not None:
            named = "," + ",".join(fault.operations) + ","
            request = Request(
                request.arguments, request.folder, request.log, fault.kind, fault.error, named, at
            )
        answer = self._ask(request)
        return Outcome(answer["code"], answer["output"], self._log.read_text(errors="replace").splitlines())

    def _ask(self, request: Request) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())
