"""Allocation of memory for blocks.

The memory is page-aligned, because direct I/O requires aligned memory. Arrays of at
least 2 MiB use huge pages: direct I/O into pages of 4 kB reaches half the speed of the
disk. New memory costs page faults, and milliseconds for each huge page if the page
cache has taken all free memory. So small arrays take the memory of earlier arrays.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

# The memory of arrays up to this size is used again.
_LARGEST_LENT = 64 << 20
_SMALLEST_BUFFER = 64 << 10
_KEPT_BYTES = 256 << 20
# Looking for an idle buffer takes longer the more buffers there are.
_MOST_BUFFERS = 64
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


# Buffers that are lent, or idle, by (length, address). Those lent last come last.
_pool: dict[tuple[int, int], Bytes] = {}
_example = [object()]
# what `getrefcount` returns for an object that only a list refers to
_IDLE = sys.getrefcount(_example[0])


def lend(size: int) -> Bytes:
    """Return a page-aligned array with arbitrary contents, uint8 [size]. Its memory is
    used again when neither the array nor a view of it exists any more.

    The memory of an array of more than 64 MiB is not used again. The process keeps at
    most 64 buffers of 256 MiB in all for other arrays.
    """
    if size > _LARGEST_LENT:
        return aligned_bytes(size)
    length = max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length())
    for key in reversed(list(_pool)):
        if key[0] == length:
            # While this thread looks at the buffer, no other thread and no signal
            # handler finds it in the pool.
            held = [_pool.pop(key, None)]
            if held[0] is not None:
                # each array that was lent, and each view of it, refers to the buffer
                is_idle = sys.getrefcount(held[0]) == _IDLE
                memory = held[0][:size]
                _pool[key] = held[0]
                if is_idle:
                    return memory
    keys = list(_pool)
    kept = sum(each for each, _ in keys)
    for position, key in enumerate(keys):
        if kept + length > _KEPT_BYTES or len(keys) - position >= _MOST_BUFFERS:
            _pool.pop(key, None)
            kept -= key[0]
    buffer = aligned_bytes(length)
    _pool[length, buffer.ctypes.data] = buffer
    return buffer[:size]
