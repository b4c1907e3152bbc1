"""Allocation, copying and checking of memory for blocks.

The memory is page-aligned, because direct I/O requires aligned memory. Large allocations use huge pages, which cause
only one page fault per 2 MiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import BF16, Blocks
from storage_formats.format.checksum import crc32c
from storage_formats.format.layout import PAGE_BYTES
from storage_formats.reading.batch import Ints
from storage_formats.reading.checksums import BlockCheck
from storage_formats.threads import run_chunks

_HUGE_PAGES_FROM = 2 << 20
_SMALLEST_BUFFER = 64 << 10
_KEPT_BYTES = 128 << 20
_COMPILED_FROM = 32 << 20
_COMPILED_AFTER = 4 << 30  # without Numba, checks of this many bytes lose about as much time as its import takes
_LINE_BYTES = 64
_NONTEMPORAL_FROM = 32 << 20
"""Minimum size in bytes of an output for non-temporal stores, which bypass the processor's cache. Copies of 480 MB are
twice as fast with them (docs/lab/storage-io.md). Smaller outputs are read next, so they stay in the cache."""

Bytes = NDArray[np.uint8]


def aligned_bytes(size: int) -> Bytes:
    """Allocate an array that starts at a page boundary, uint8 [size]."""
    mapped = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory: Bytes = np.frombuffer(mapped, dtype=np.uint8, count=size)
    return memory


def aligned_blocks(count: int, block_shape: tuple[int, int]) -> Blocks:
    """Allocate an array that starts at a page boundary, bfloat16 [count, m, d]."""
    size = count * block_shape[0] * block_shape[1] * BF16.itemsize
    blocks: Blocks = aligned_bytes(size).view(BF16).reshape(count, *block_shape)
    return blocks


def memory_at(address: int, size: int) -> Bytes:
    """Return a read-only view of the memory at `address`, uint8 [size]. The memory must be mapped when it is read."""
    interface = {"version": 3, "data": (address, True), "shape": (size,), "typestr": "|u1"}
    memory: Bytes = np.asarray(SimpleNamespace(__array_interface__=interface))
    return memory


class BufferPool:
    """A pool of reusable buffers, because new memory costs page faults. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Bytes]] = {}
        self._kept_bytes = 0

    def borrow(self, size: int) -> Bytes:
        """Return a page-aligned buffer of at least `size` bytes. The contents are arbitrary."""
        size = max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length())
        with self._lock:
            if self._free.get(size):
                self._kept_bytes -= size
                return self._free[size].pop()
        buffer = aligned_bytes(size)
        buffer[::PAGE_BYTES] = 0  # io_uring would pass requests for missing pages to a slow worker thread
        return buffer

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


def copy_checked(
    sources: Ints,
    targets: Ints,
    size: int,
    check: BlockCheck,
    threads: int | None = None,
    held: object = None,
) -> None:
    """Copy `size` bytes from address `sources[i]` to address `targets[i]` for each i, and compare their checksums.

    Args:
        sources: [k], addresses to read from.
        targets: [k], addresses to write to.
        size: number of bytes to copy from each address.
        check: check of the k records.
        threads: maximum number of threads; None uses `default_threads()`.
        held: the owners of the memory. A thread that works on after an interruption keeps them alive.

    Raises:
        CorruptIndexError: a computed checksum differs from the stored checksum.
    """
    sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
    is_aligned = size % _LINE_BYTES == 0 and not (targets % _LINE_BYTES).any()
    total = len(sources) * size
    loops = _loops(total)
    copy = loops.copy_nontemporal if total >= _NONTEMPORAL_FROM and is_aligned else loops.copy

    def work(start: int, stop: int, _held: object = held) -> None:
        actual = np.empty(stop, dtype=np.uint32)
        copy(sources, targets, size, actual, start, stop)
        check.compare(actual, start, stop)

    run_chunks(work, len(sources), size, threads)


def memory_check(sources: Ints, size: int, check: BlockCheck) -> Callable[[int, int], None]:
    """Return a function `(start, stop)` that checks the records at `sources[start:stop]` on the calling thread."""
    sources = np.ascontiguousarray(sources)
    compute = _loops(len(sources) * size).checksums
    actual = np.empty(len(sources), dtype=np.uint32)

    def check_part(start: int, stop: int) -> None:
        compute(sources, size, actual, start, stop)
        check.compare(actual, start, stop)

    return check_part


def checksums_at(sources: Ints, size: int) -> NDArray[np.uint32]:
    """Return the CRC-32C of the `size` bytes at each address in `sources` [k], uint32 [k]."""
    sources = np.ascontiguousarray(sources)
    compute, actual = _loops(len(sources) * size).checksums, np.empty(len(sources), dtype=np.uint32)
    run_chunks(functools.partial(compute, sources, size, actual), len(sources), size, None)
    return actual


class _Loops(NamedTuple):
    """Loops over records that release the GIL. `reading.loops` describes their arguments."""

    checksums: Callable[..., None]
    copy: Callable[..., None]
    copy_nontemporal: Callable[..., None]


def _plain_checksums(sources: Ints, size: int, checksums: NDArray[np.uint32], start: int, stop: int) -> None:
    global _plainly_checked_bytes
    for index in range(start, stop):
        checksums[index] = crc32c(memory_at(int(sources[index]), size))
    _plainly_checked_bytes += (stop - start) * size


def _plain_copy(sources: Ints, targets: Ints, size: int, checksums: NDArray[np.uint32], start: int, stop: int) -> None:
    for source, target in zip(sources[start:stop].tolist(), targets[start:stop].tolist(), strict=True):
        ctypes.memmove(target, source, size)
    _plain_checksums(targets, size, checksums, start, stop)


_PLAIN = _Loops(_plain_checksums, _plain_copy, _plain_copy)
_plainly_checked_bytes = 0


@functools.cache
def _compiled_loops() -> _Loops:
    try:
        from storage_formats.reading import loops
    except ImportError:
        return _PLAIN
    if not loops.has_crc_instruction():
        return _PLAIN
    return _Loops(loops.compute_checksums, loops.copy_checked, loops.copy_checked_nontemporal)


def _loops(total: int) -> _Loops:
    """Return compiled loops if Numba is imported, or if enough bytes are checked to make its import worthwhile."""
    # Importing Numba takes half a second.
    compiled = "numba" in sys.modules or total >= _COMPILED_FROM or _plainly_checked_bytes > _COMPILED_AFTER
    return _compiled_loops() if compiled else _PLAIN
