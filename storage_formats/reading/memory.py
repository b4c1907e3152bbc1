"""Allocation of memory for blocks.

The memory is page-aligned, because direct I/O requires aligned memory. New memory costs
page faults. So small arrays take the memory of earlier ones, and large arrays use huge
pages, which cause only one page fault per 2 MiB. Small arrays do not use huge pages: if
the page cache fills the memory, the kernel takes milliseconds to find one.
"""

from __future__ import annotations

import contextlib
import mmap
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

# The memory of arrays up to this size is used again. Larger arrays get huge pages.
_LARGEST_LENT = 64 << 20
_SMALLEST_BUFFER = 64 << 10
_KEPT_BYTES = 128 << 20

Bytes = NDArray[np.uint8]


def aligned_bytes(size: int) -> Bytes:
    """Allocate an array that starts at a page boundary, uint8 [size]."""
    mapped = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # only Linux has this advice
    if size > _LARGEST_LENT and hasattr(mmap, "MADV_HUGEPAGE"):
        # the kernel may have been built without huge pages
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory: Bytes = np.frombuffer(mapped, dtype=np.uint8, count=size)
    return memory


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

    Thread-safe without a lock, because methods of lists are atomic. So a destructor can
    give a buffer back at any time, also in the middle of a call of the same thread.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}

    def borrow(self, size: int) -> Bytes:
        """Return a page-aligned buffer of at least `size` bytes. The contents are
        arbitrary.
        """
        size = max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length())
        try:
            return self._free[size].pop()
        except (KeyError, IndexError):
            return aligned_bytes(size)

    def give_back(self, buffer: Bytes) -> None:
        """Return a buffer to the pool. The pool keeps at most 128 MiB."""
        kept = sum(size * len(buffers) for size, buffers in [*self._free.items()])
        if kept + len(buffer) <= _KEPT_BYTES:
            self._free.setdefault(len(buffer), []).append(buffer)

    def lend(self, size: int) -> Bytes:
        """Return an array with arbitrary contents, uint8 [size]. Its memory returns to
        the pool when neither the array nor a view of it exists any more.
        """
        if size > _LARGEST_LENT:
            return aligned_bytes(size)
        memory: Bytes = np.asarray(_Lent(self, self.borrow(size), size))
        return memory

    def close(self) -> None:
        """Free the idle buffers."""
        self._free.clear()


class _Lent:
    """The owner of the memory of an array that `BufferPool.lend` returned. Each view of
    the array refers to this object.
    """

    def __init__(self, pool: BufferPool, buffer: Bytes, size: int) -> None:
        self._pool = pool
        self._buffer = buffer
        self.__array_interface__ = buffer[:size].__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._buffer)
