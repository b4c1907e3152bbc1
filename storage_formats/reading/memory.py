"""Allocation of memory for blocks.

The memory is page-aligned, because direct I/O requires aligned memory. Large
allocations use huge pages, which cause only one page fault per 2 MiB.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import BF16, Blocks

_HUGE_PAGES_FROM = 2 << 20
_SMALLEST_BUFFER = 64 << 10
_KEPT_BYTES = 128 << 20

Bytes = NDArray[np.uint8]


def aligned_bytes(size: int) -> Bytes:
    """Allocate an array that starts at a page boundary, uint8 [size]."""
    mapped = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # only Linux has this advice
    if size >= _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        # the kernel may have been built without huge pages
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory: Bytes = np.frombuffer(mapped, dtype=np.uint8, count=size)
    return memory


def aligned_blocks(count: int, block_shape: tuple[int, int]) -> Blocks:
    """Allocate an array that starts at a page boundary, bfloat16 [count, m, d]."""
    size = count * block_shape[0] * block_shape[1] * BF16.itemsize
    blocks: Blocks = aligned_bytes(size).view(BF16).reshape(count, *block_shape)
    return blocks


def memory_at(address: int, size: int) -> Bytes:
    """Return a read-only view of the memory at `address`, uint8 [size]. The caller must
    keep the memory mapped while the view is read.
    """
    interface = {
        "version": 3,
        "data": (address, True),
        "shape": (size,),
        "typestr": "|u1",
    }
    memory: Bytes = np.asarray(SimpleNamespace(__array_interface__=interface))
    return memory


class BufferPool:
    """A pool of buffers that are used again, because new memory costs page faults.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Bytes]] = {}
        self._kept_bytes = 0

    def borrow(self, size: int) -> Bytes:
        """Return a page-aligned buffer of at least `size` bytes. The contents are
        arbitrary.
        """
        size = max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length())
        with self._lock:
            if self._free.get(size):
                self._kept_bytes -= size
                return self._free[size].pop()
        return aligned_bytes(size)

    def give_back(self, buffer: Bytes) -> None:
        """Return a buffer to the pool. The pool keeps at most 128 MiB."""
        with self._lock:
            if self._kept_bytes + len(buffer) <= _KEPT_BYTES:
                self._kept_bytes += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)

    def close(self) -> None:
        """Free the idle buffers."""
        with self._lock:
            self._free.clear()
            self._kept_bytes = 0
