"""Measures the processor time, memory and duration of a command and its descendant processes. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from storage_formats.errors import EdjeError

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_SAMPLE_SECONDS = 0.5
_ORPHAN_SECONDS = 180.0
_MEASURE = """
import json, sys
from dataclasses import asdict
from benchmarks.process_tree import measure
print(json.dumps(asdict(measure(sys.argv[1:]))))
"""


@dataclass(frozen=True)
class Cost:
    """Cost of one run of a command.

    Attributes:
        wall: seconds from the start to the end of the command.
        cpu: user and system seconds of the command and its descendants.
        peak_pss: peak memory in bytes: the largest sampled sum of the proportional set sizes of all processes.
        peak_largest_rss: largest resident set of a single process, in bytes.
        stdout: standard output of the command.
    """

    wall: float
    cpu: float
    peak_pss: int
    peak_largest_rss: int
    stdout: str


def measure(command: Sequence[str], env: dict[str, str] | None = None) -> Cost:
    """Run `command` and return the cost of the command and its descendants.

    Call this function only once in a process, and only in a process without other children.

    Raises:
        EdjeError: the command failed, or a process of the command did not end.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    sampler = _Sampler(os.getpid())
    sampler.start()
    stdout, stderr = process.communicate()
    wall = time.perf_counter() - started
    peak, sampled_cpu = sampler.stop()
    if process.returncode != 0:
        raise EdjeError(
            f"the command '{' '.join(command[:4])} ...' failed with exit code {process.returncode}: {stderr[-2000:]}"
        )
    _reap_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, max(cpu, sampled_cpu), peak, after.ru_maxrss * 1024, stdout)


def measure_in_new_process(command: Sequence[str]) -> dict[str, Any]:
    """Call `measure` in a new process, so that no earlier child processes are counted.

    Returns:
        The attributes of `Cost`. `stdout` holds the JSON object that the command printed.

    Raises:
        EdjeError: the command failed.
    """
    done = subprocess.run([sys.executable, "-c", _MEASURE, *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EdjeError(f"a measured command failed: {done.stderr[-2000:]}")
    cost: dict[str, Any] = json.loads(done.stdout)
    return {**cost, "stdout": json.loads(cost["stdout"])}


def _reap_orphans() -> None:
    """Wait for processes that outlive the command. The kernel counts their processor time only after they end."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.1)
    raise EdjeError(
        f"processes of the command still ran {_ORPHAN_SECONDS:.0f} s after its end; stop these "
        "processes, and repeat the benchmark"
    )


class _Sampler(threading.Thread):
    """Thread that samples the memory and processor time of all descendants of a process."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._peak = 0
        self._cpu: dict[int, float] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(_SAMPLE_SECONDS):
            processes = psutil.Process(self._pid).children(recursive=True)
            self._peak = max(self._peak, sum(_pss(process) for process in processes))
            for process in processes:
                self._cpu[process.pid] = max(self._cpu.get(process.pid, 0.0), _cpu_seconds(process))

    def stop(self) -> tuple[int, float]:
        """Stop sampling.

        Return (largest sum of proportional set sizes in bytes, processor seconds of all processes).
        """
        self._stopped.set()
        self.join()
        return self._peak, sum(self._cpu.values())


def _cpu_seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _pss(process: psutil.Process) -> int:
    """Return the proportional set size of a process in bytes; 0 if the process has ended."""
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0
