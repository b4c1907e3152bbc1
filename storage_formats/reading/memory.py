"""Memory for blocks: page-aligned, in huge pages where it is large, and copied without the GIL.

Direct I/O wants aligned memory. Fresh memory costs a page fault for each page, which for a large warm fetch is more
than copying the blocks; huge pages make that one for 2 MiB.
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
from storage_formats.codecs.nontemporal import streams
from storage_formats.codecs.threads import run_chunks
from storage_formats.format.layout import PAGE_BYTES

_HUGE_FROM = 2 << 20
_SMALLEST_BUFFER = 64 << 10
_KEPT_BYTES = 128 << 20
_COMPILE_FROM = 32 << 20

Bytes = NDArray[np.uint8]


def aligned_bytes(size: int) -> Bytes:
    """New memory, uint8 [size], that starts at a page."""
    mapped = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory: Bytes = np.frombuffer(mapped, dtype=np.uint8, count=size)
    return memory


def memory_at(address: int, size: int) -> Bytes:
    """The memory from `address` on, uint8 [size]: of what is mapped there, which may be only parts of it."""
    described = {"version": 3, "data": (address, True), "shape": (size,), "typestr": "|u1"}
    memory: Bytes = np.asarray(SimpleNamespace(__array_interface__=described))
    return memory


def touch(records: Bytes, rows: NDArray[np.int64]) -> None:
    """Have the memory of `records[rows]` exist before the kernel is to write there; its content is lost.

    io_uring hands a request to a worker thread, at many times the cost, where a page of its memory has yet to be made.
    """
    size = records.shape[1]
    records[rows[:, None], np.arange(0, size + PAGE_BYTES, PAGE_BYTES).clip(max=size - 1)] = 0


def aligned_blocks(count: int, block_shape: tuple[int, int]) -> Blocks:
    """New memory for `count` blocks, bfloat16 [count, m, d]."""
    size = count * block_shape[0] * block_shape[1] * BF16.itemsize
    blocks: Blocks = aligned_bytes(size).view(BF16).reshape(count, *block_shape)
    return blocks


class BufferPool:
    """Memory that is used again, its pages already there. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Bytes]] = {}
        self._kept = 0

    def borrow(self, size: int) -> Bytes:
        """At least `size` bytes, page-aligned, of any content."""
        size = max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length())
        with self._lock:
            if self._free.get(size):
                self._kept -= size
                return self._free[size].pop()
        buffer = aligned_bytes(size)
        buffer[::PAGE_BYTES] = 0  # see `touch`
        return buffer

    def give_back(self, buffer: Bytes) -> None:
        """Keep `buffer` for another borrower."""
        with self._lock:
            if self._kept + len(buffer) <= _KEPT_BYTES:
                self._kept += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)

    def close(self) -> None:
        """Let the idle buffers go."""
        with self._lock:
            self._free.clear()
            self._kept = 0


def copy_memory(
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    size: int,
    threads: int | None = None,
    total: int | None = None,
) -> None:
    """Copy `size` bytes from each address of `sources` to that of `targets`, on several threads.

    `total` is how many bytes that is, or with what is copied before and after it: it decides how to copy.

    A compiled loop where there is much to copy, which is 1.3 times as fast and more with threads, and past the cache
    where it is more than that holds; but Numba takes half a second to import, and readers of `bf16` may not have it.
    ctypes too lets the GIL go around each copy.
    """
    sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
    total = len(sources) * size if total is None else total
    compiled = "numba" in sys.modules or total >= _COMPILE_FROM
    loop = _compiled_loop(streams(total, size, targets)) if compiled else _copy_pieces
    run_chunks(lambda start, stop: loop(sources, targets, size, start, stop), len(sources), size, threads)


@functools.cache
def _compiled_loop(past_cache: bool) -> Callable[[NDArray[np.int64], NDArray[np.int64], int, int, int], None]:
    try:
        from storage_formats.reading.copying import copy_pieces, stream_pieces
    except ImportError:
        return _copy_pieces
    return stream_pieces if past_cache else copy_pieces


def _copy_pieces(sources: NDArray[np.int64], targets: NDArray[np.int64], size: int, start: int, stop: int) -> None:
    for source, target in zip(sources[start:stop].tolist(), targets[start:stop].tolist(), strict=True):
        ctypes.memmove(target, source, size)
