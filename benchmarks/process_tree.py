"""What a command and everything that it starts cost: processor time, memory, wall time. Linux only.

The measuring process is made the "subreaper" of its descendants (prctl(2)), so that daemons which outlive their
parent, such as those of Ray, are waited for here and the kernel's own accounting of them is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from storage_formats.errors import EdjeError

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_SAMPLE_SECONDS = 0.5
_ORPHAN_SECONDS = 180.0


@dataclass(frozen=True)
class Cost:
    """Cost of one run.

    Attributes:
        wall: seconds from start to exit of the command itself.
        cpu: user and system seconds of the whole tree, by the kernel's account of those that were waited for, or by
            samples of each process where that is more: a parent that ignores SIGCHLD takes its children's account
            with it.
        peak_pss: largest sampled sum of proportional set sizes of the tree, bytes; shared pages count once.
        peak_largest_rss: largest resident set of any single process, bytes, as the kernel tells.
        stdout: what the command printed.
    """

    wall: float
    cpu: float
    peak_pss: int
    peak_largest_rss: int
    stdout: str


def measure(command: Sequence[str], env: dict[str, str] | None = None) -> Cost:
    """Run `command` to its end and account for every process that it started.

    Call it from a process that has no other children and measures once: accounting is for all children together.
    Raises EdjeError with the end of its error output if the command fails.
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
        raise EdjeError(f"{' '.join(command[:4])} ... failed ({process.returncode}): {stderr[-2000:]}")
    _reap_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, max(cpu, sampled_cpu), peak, after.ru_maxrss * 1024, stdout)


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def _reap_orphans() -> None:
    """Wait for daemons that the command left behind, so that their processor time is counted."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.1)
    raise EdjeError(f"processes were still running {_ORPHAN_SECONDS:.0f} s after the command ended")


class _Sampler(threading.Thread):
    """Largest sum of proportional set sizes below a process, and the last seen CPU seconds of each."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._peak = 0
        self._cpu: dict[int, float] = {}
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            pids = descendants(self._pid)
            self._peak = max(self._peak, sum(_pss(pid) for pid in pids))
            for pid in pids:
                self._cpu[pid] = max(self._cpu.get(pid, 0.0), _cpu_seconds(pid))

    def stop(self) -> tuple[int, float]:
        """(bytes, seconds)."""
        self._over.set()
        self.join()
        return self._peak, sum(self._cpu.values())


def _cpu_seconds(pid: int) -> float:
    """User and system seconds of one process, without its children; 0 when it has gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime: proc(5)
    return 0.0


def _pss(pid: int) -> int:
    """Proportional set size of a process in bytes; 0 when it has gone."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return 0
