"""Allocation of memory for blocks.

The memory is page-aligned, because direct I/O requires aligned memory. Arrays of at
least 2 MiB use huge pages: direct I/O into pages of 4 kB reaches half the speed of the
disk. New memory costs page faults, and milliseconds for each huge page if the page
cache has taken all free memory. So small arrays take the memory of earlier arrays.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

from storage_formats.threads import fork_safe_lock

# The memory of arrays up to this size is used again.
_LARGEST_LENT = 64 << 20
_SMALLEST_BUFFER = 64 << 10
_KEPT_BYTES = 128 << 20
_HUGE_PAGE = 2 << 20

Bytes = NDArray[np.uint8]


def aligned_bytes(size: int) -> Bytes:
    """Allocate an array that starts at a page boundary, uint8 [size]."""
    mapped = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # only Linux has this advice
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # the kernel may have been built without huge pages
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory: Bytes = np.frombuffer(mapped, dtype=np.uint8, count=size)
    return memory


class _Interface:
    """An object that NumPy reads as an array of bytes at a memory address."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": (size,),
            "typestr": "|u1",
        }


# NumPy makes no array at the address 0.
_FIRST_ADDRESS = 64
ADDRESS_SPACE: Bytes = np.asarray(_Interface(_FIRST_ADDRESS, 1 << 62))
"""The whole address space as a read-only array. Kernels that take an array of bytes and
offsets read records at any address from this array. The caller must keep the memory
allocated meanwhile.
"""


def offset_of(addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offset in `ADDRESS_SPACE` of each of `addresses` [k], int64 [k]."""
    return addresses - _FIRST_ADDRESS


class _Owner:
    """The owner of the memory of a lent array. Each view of the array refers to it."""

    def __init__(self, buffer: Bytes, size: int) -> None:
        self._buffer = buffer
        self.__array_interface__ = buffer[:size].__array_interface__


class _Loan(weakref.ref[_Owner]):
    """A weak reference to the owner of a lent array. It keeps the buffer, so that the
    pool can take the buffer back when the owner no longer exists.
    """

    buffer: Bytes


class BufferPool:
    """A pool of buffers that are used again, because new memory costs page faults.
    Thread-safe.
    """

    def __init__(self) -> None:
        # The lock is reentrant, because a signal handler that fetches blocks may
        # interrupt a method that holds the lock.
        self._lock = fork_safe_lock()
        self._free: dict[int, list[Bytes]] = {}
        self._kept_bytes = 0
        self._loans: set[_Loan] = set()
        self._lent_bytes = 0
        # Loans whose owners no longer exist. They are added by `append`, which is
        # written in C, and not by a destructor: if a signal handler raises an exception
        # while a destructor runs, Python drops the exception.
        self._ended: deque[_Loan] = deque()

    def borrow(self, size: int) -> Bytes:
        """Return a page-aligned buffer of at least `size` bytes. The contents are
        arbitrary.
        """
        size = max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length())
        with self._lock:
            while self._ended:
                loan = self._ended.popleft()
                self._loans.discard(loan)
                self._lent_bytes -= len(loan.buffer)
                self.give_back(loan.buffer)
            if self._free.get(size):
                self._kept_bytes -= size
                return self._free[size].pop()
        return aligned_bytes(size)

    def give_back(self, buffer: Bytes) -> None:
        """Return a buffer to the pool. The pool keeps at most 128 MiB."""
        with self._lock:
            if len(buffer) <= _KEPT_BYTES:
                if self._kept_bytes + len(buffer) > _KEPT_BYTES:
                    # Free all other buffers, because the size of this buffer is the
                    # most likely to be requested next.
                    self.close()
                self._kept_bytes += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)

    def lend(self, size: int) -> Bytes:
        """Return an array with arbitrary contents, uint8 [size]. Its memory is used
        again when neither the array nor a view of it exists any more.

        The memory of an array is not used again if the array has more than 64 MiB, or
        if more than 128 MiB would be lent at the same time.
        """
        if size > _LARGEST_LENT:
            return aligned_bytes(size)
        buffer = self.borrow(size)
        with self._lock:
            if self._lent_bytes + len(buffer) > _KEPT_BYTES:
                return buffer[:size]
            self._lent_bytes += len(buffer)
            owner = _Owner(buffer, size)
            loan = _Loan(owner, self._ended.append)
            loan.buffer = buffer
            self._loans.add(loan)
        memory: Bytes = np.asarray(owner)
        return memory

    def close(self) -> None:
        """Free the idle buffers."""
        with self._lock:
            self._free.clear()
            self._kept_bytes = 0
