"""Reduces the free memory: `python -m benchmarks.fetch.memory_pressure BYTES` allocates BYTES of memory.

The process frees the memory when its standard input ends. If memory runs out, the kernel kills this process first.
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
    """Return the bytes of memory that are available to processes and to the page cache, from /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise EdjeError("/proc/meminfo has no line MemAvailable, which memory_cap needs; do not use memory_cap")


def check_memory_cap(left: int, needed: int) -> None:
    """Raise UsageError unless `needed` <= `left` < free memory, in bytes."""
    if left < needed:
        raise UsageError(
            f"memory_cap is {left / 2**30:.1f} GiB, but a run needs {needed / 2**30:.1f} GiB; choose "
            "a larger memory_cap or a smaller pool"
        )
    if left >= available_bytes():
        raise UsageError(
            f"memory_cap is {left / 2**30:.1f} GiB, but only {available_bytes() / 2**30:.1f} GiB are "
            "free; choose a smaller memory_cap"
        )


@contextlib.contextmanager
def memory_cap(left: int, needed: int) -> Iterator[str]:
    """Return a context in which about `left` bytes of memory are free. A child process allocates the other free memory.

    Yields a description for reports.

    Raises:
        UsageError: `left` is less than `needed`, or not less than the free memory.
        EdjeError: the child process cannot allocate the memory.
    """
    check_memory_cap(left, needed)
    size = available_bytes() - left
    command = [sys.executable, "-m", "benchmarks.fetch.memory_pressure", str(size)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=child_environment(), **pipes) as process:  # type: ignore[call-overload]
        try:
            state = process.stdout.readline().strip()
            if not state:
                raise EdjeError(
                    f"cannot allocate {size / 2**30:.1f} GiB to limit the free memory; choose a larger memory_cap"
                )
            yield f"a second process held {size / 2**30:.1f} GiB ({state}) and left {left / 2**30:.1f} GiB"
        finally:
            process.kill()


def main(size: int) -> None:
    """Allocate `size` bytes, and keep them until standard input ends."""
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
