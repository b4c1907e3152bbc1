"""Starts `edje-index serve` in a new process, and reads the memory use of the process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from storage_formats.errors import EdjeError

_SAMPLE_SECONDS = 0.2
_STOP_SECONDS = 60


class ServiceProcess:
    """A process of `edje-index serve`.

    Attributes:
        url: address of the service.
        log: file with the standard error of the process.
    """

    def __init__(self, url: str, process: subprocess.Popen[str], log: Path) -> None:
        self.url = url
        self.log = log
        self._process = process

    @property
    def running(self) -> bool:
        """True until the process ends."""
        return self._process.poll() is None

    def memory(self) -> int:
        """Return the resident bytes of the process; 0 if the process has ended."""
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    @property
    def tracebacks(self) -> int:
        """Number of tracebacks in the log."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")


@contextmanager
def running_service(indexes: Sequence[Path], options: Sequence[str]) -> Iterator[ServiceProcess]:
    """Run `edje-index serve INDEX... OPTIONS` during the `with` block, on a free port of the local host.

    Raises:
        EdjeError: the service does not start.
    """
    command = [sys.executable, "-m", "pipelines.cli", "serve", *map(str, indexes), "--port", "0", *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "service.log"
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url.startswith("http://"):
                raise EdjeError(f"the service did not start: {log.read_text(errors='replace')[-2000:].strip()}")
            yield ServiceProcess(url, process, log)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


class PeakMemory:
    """Samples the memory use of a service during the `with` block.

    Attributes:
        peak: largest number of resident bytes.
    """

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, self._service.memory())
            if self._stopped.wait(_SAMPLE_SECONDS):
                return
