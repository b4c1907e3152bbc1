"""Starts a worker process and communicates with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import Any, Self

_START_SECONDS = 600.0  # covers a warm run before the first answer


def child_environment() -> dict[str, str]:
    """Return environment variables with which a child process finds the same Python packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


class WorkerError(Exception):
    """A worker process ended early or took too long."""


class WorkerProcess:
    """A worker process for one job. The end of the `with` block kills the process."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fetch.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=child_environment(),
        )
        self._timed_out = False
        self._send(json.dumps(job))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def wait(self, seconds: float = _START_SECONDS) -> dict[str, Any]:
        """Return the next message of the worker. Raise WorkerError after `seconds`, or if the worker process ends."""
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True  # a signal may arrive at any line, and the timer must not keep the process alive
        try:
            timer.start()
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise WorkerError(f"the worker took more than {seconds:.0f} s" if self._timed_out else self._failure())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, seconds: float) -> dict[str, Any]:
        """Start the run in a worker that is ready, and return the results."""
        self._send("go")
        return self.wait(seconds)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(self._failure()) from error

    def _kill(self) -> None:
        self._timed_out = True
        self._process.kill()

    def _failure(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return f"ended with code {code}: {lines[-1] if lines else 'no message'}"
