"""Memory taken away, so that a store is larger than what is left: `python -m benchmarks.fetch.memory_pressure BYTES`.

A child process holds locked, touched pages for as long as it is wanted. It asks the kernel to be the first to be
killed if memory runs out. No cgroup is used: that would need rights which few users have.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fetch.worker_process import child_environment
from storage_formats.errors import EdjeError, UsageError

_STEP = 64 << 20


def available_bytes() -> int:
    """Memory that programs and the page cache can have, by /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise EdjeError("/proc/meminfo tells of no available memory; leave out --memory-cap")


def check_memory_cap(left: int, needed: int) -> None:
    """UsageError where `left` bytes are less than `needed`, or no less than what is free anyway."""
    if left < needed:
        raise UsageError(
            f"--memory-cap {left / 2**30:.1f} GiB is less than a run needs, {needed / 2**30:.1f} GiB; "
            "give more, or a smaller --pool"
        )
    if left >= available_bytes():
        raise UsageError(
            f"--memory-cap {left / 2**30:.1f} GiB has no effect: only {available_bytes() / 2**30:.1f} GiB are free"
        )


@contextlib.contextmanager
def memory_cap(left: int, needed: int) -> Iterator[str]:
    """Leave about `left` bytes of memory to everything else; gives a description for reports.

    Raises as `check_memory_cap`.
    """
    check_memory_cap(left, needed)
    size = available_bytes() - left
    command = [sys.executable, "-m", "benchmarks.fetch.memory_pressure", str(size)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=child_environment(), **pipes) as process:  # type: ignore[call-overload]
        try:
            how = process.stdout.readline().strip()
            if not how:
                raise EdjeError(f"could not take {size / 2**30:.1f} GiB of memory away; give a larger --memory-cap")
            yield f"{size / 2**30:.1f} GiB held by a ballast process ({how}), {left / 2**30:.1f} GiB left"
        finally:
            process.kill()


def main(size: int) -> None:
    """Hold `size` bytes until standard input ends."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    memory = mmap.mmap(-1, size)
    view = (ctypes.c_char * size).from_buffer(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    locked = True
    for start in range(0, size, _STEP):
        length = min(_STEP, size - start)
        ctypes.memset(ctypes.addressof(view) + start, 1, length)
        address = ctypes.c_void_p(ctypes.addressof(view) + start)
        locked = locked and not libc.mlock(address, ctypes.c_size_t(length))
    print("locked" if locked else "touched, not locked", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
