"""Allocation and copying of memory for blocks.

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

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import BF16, Blocks
from storage_formats.codecs.nontemporal import use_nontemporal
from storage_formats.codecs.threads import run_chunks
from storage_formats.format.checksum import crc32c
from storage_formats.format.layout import PAGE_BYTES
from storage_formats.reading.checksums import BlockCheck

_HUGE_PAGES_FROM = 2 << 20
_SMALLEST_BUFFER = 64 << 10
_KEPT_BYTES = 128 << 20
_COMPILED_COPY_FROM = 32 << 20
_COMPILED_CHECKS_AFTER = 4 << 30  # without Numba, checks of this many bytes lose about as much time as its import takes

Bytes = NDArray[np.uint8]


def aligned_bytes(size: int) -> Bytes:
    """Allocate an array that starts at a page boundary, uint8 [size]."""
    mapped = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory: Bytes = np.frombuffer(mapped, dtype=np.uint8, count=size)
    return memory


def memory_at(address: int, size: int) -> Bytes:
    """Return a read-only view of the memory at `address`, uint8 [size]. The memory must be mapped when it is read."""
    interface = {"version": 3, "data": (address, True), "shape": (size,), "typestr": "|u1"}
    memory: Bytes = np.asarray(SimpleNamespace(__array_interface__=interface))
    return memory


def touch(records: Bytes, rows: NDArray[np.int64]) -> None:
    """Write to every memory page of `records[rows]`, so that the pages are present. Overwrites the records."""
    # io_uring would pass requests for missing pages to a slow worker thread.
    size = records.shape[1]
    records[rows[:, None], np.arange(0, size + PAGE_BYTES, PAGE_BYTES).clip(max=size - 1)] = 0


def aligned_blocks(count: int, block_shape: tuple[int, int]) -> Blocks:
    """Allocate an array that starts at a page boundary, bfloat16 [count, m, d]."""
    size = count * block_shape[0] * block_shape[1] * BF16.itemsize
    blocks: Blocks = aligned_bytes(size).view(BF16).reshape(count, *block_shape)
    return blocks


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
        buffer[::PAGE_BYTES] = 0  # see `touch`
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


def copy_memory(
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    size: int,
    threads: int | None = None,
    *,
    total: int | None = None,
    check: BlockCheck | None = None,
) -> None:
    """Copy `size` bytes from address `sources[i]` to address `targets[i]` for each i, on several threads.

    Args:
        sources: [k], addresses to read from.
        targets: [k], addresses to write to.
        size: number of bytes to copy from each address.
        threads: maximum number of threads; None uses `default_threads()`.
        total: number of bytes in a series of calls. The number determines which loop is used. None means `k * size`.
        check: check of the k records. None skips the comparison of checksums.

    Raises:
        CorruptIndexError: a computed checksum differs from the stored checksum.
    """
    # Small copies use ctypes, which also releases the GIL, because importing Numba takes half a second.
    sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
    total = len(sources) * size if total is None else total
    nontemporal = use_nontemporal(total, size, targets)
    compiled = use_compiled(total)
    if check is None:
        loop = _compiled_loop(nontemporal) if compiled else _copy_pieces
        work = functools.partial(loop, sources, targets, size)
    else:
        checked_loop = _compiled_checked_loop(nontemporal) if compiled else _copy_checked_pieces
        work = functools.partial(_copy_and_compare, checked_loop, sources, targets, size, check)
    run_chunks(work, len(sources), size, threads)


def check_memory(
    sources: NDArray[np.int64], size: int, check: BlockCheck, threads: int | None = None, *, total: int | None = None
) -> None:
    """Compare the checksum of the `size` bytes at each address in `sources` [k] with the stored checksum.

    For the other arguments, see `copy_memory`.

    Raises:
        CorruptIndexError: a computed checksum differs from the stored checksum.
    """
    run_chunks(memory_check(sources, size, check, total=total), len(sources), size, threads)


def checksums_at(sources: NDArray[np.int64], size: int) -> NDArray[np.uint32]:
    """Return the CRC-32C of the `size` bytes at each address in `sources` [k], uint32 [k]."""
    loop = _compiled_checksums() if use_compiled(len(sources) * size) else _checksum_pieces
    actual = np.empty(len(sources), dtype=np.uint32)
    run_chunks(functools.partial(loop, np.ascontiguousarray(sources), size, actual), len(sources), size, None)
    return actual


def memory_check(
    sources: NDArray[np.int64], size: int, check: BlockCheck, *, total: int | None = None
) -> Callable[[int, int], None]:
    """Return a function `(start, stop)` that checks the records at `sources[start:stop]` on the calling thread.

    For the arguments, see `copy_memory`.
    """
    sources = np.ascontiguousarray(sources)
    compiled = use_compiled(len(sources) * size if total is None else total)
    loop = _compiled_checksums() if compiled else _checksum_pieces
    actual = np.empty(len(sources), dtype=np.uint32)

    def check_part(start: int, stop: int) -> None:
        loop(sources, size, actual, start, stop)
        check.compare(actual, start, stop)

    return check_part


def use_compiled(total: int) -> bool:
    """Return True if Numba is imported, or if enough bytes are checked to make the slow import of Numba worthwhile."""
    return "numba" in sys.modules or total >= _COMPILED_COPY_FROM or _checked_bytes > _COMPILED_CHECKS_AFTER


def _copy_and_compare(
    loop: Callable[..., None],
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    size: int,
    check: BlockCheck,
    start: int,
    stop: int,
) -> None:
    actual = np.empty(stop, dtype=np.uint32)
    loop(sources, targets, size, actual, start, stop)
    check.compare(actual, start, stop)


@functools.cache
def _compiled_loop(nontemporal: bool) -> Callable[[NDArray[np.int64], NDArray[np.int64], int, int, int], None]:
    try:
        from storage_formats.reading.copying import copy_pieces, copy_pieces_nontemporal
    except ImportError:
        return _copy_pieces
    return copy_pieces_nontemporal if nontemporal else copy_pieces


@functools.cache
def _compiled_checked_loop(nontemporal: bool) -> Callable[..., None]:
    try:
        from storage_formats.reading import checked_copying
    except ImportError:
        return _copy_checked_pieces
    if not checked_copying.has_crc_instruction():
        return _copy_checked_pieces
    return checked_copying.copy_checked_nontemporal if nontemporal else checked_copying.copy_checked


@functools.cache
def _compiled_checksums() -> Callable[..., None]:
    try:
        from storage_formats.reading import checked_copying
    except ImportError:
        return _checksum_pieces
    return checked_copying.compute_checksums if checked_copying.has_crc_instruction() else _checksum_pieces


def _copy_pieces(sources: NDArray[np.int64], targets: NDArray[np.int64], size: int, start: int, stop: int) -> None:
    for source, target in zip(sources[start:stop].tolist(), targets[start:stop].tolist(), strict=True):
        ctypes.memmove(target, source, size)


def _copy_checked_pieces(
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    size: int,
    checksums: NDArray[np.uint32],
    start: int,
    stop: int,
) -> None:
    _copy_pieces(sources, targets, size, start, stop)
    _checksum_pieces(targets, size, checksums, start, stop)


def _checksum_pieces(
    sources: NDArray[np.int64], size: int, checksums: NDArray[np.uint32], start: int, stop: int
) -> None:
    global _checked_bytes
    for index in range(start, stop):
        checksums[index] = crc32c(memory_at(int(sources[index]), size))
    _checked_bytes += (stop - start) * size


_checked_bytes = 0  # number of bytes that `_checksum_pieces` has processed
