"""Python threads for conversions, which release the GIL.

Numba's own thread pools are not used: they abort the process if two threads call at once (workqueue) or after a fork
(OpenMP), and stores are read from many threads in processes that fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from storage_formats.cpus import usable_cpus

_CHUNK_BYTES = 2 << 20  # of bfloat16: about 0.3 ms of work, much longer than handing it to a thread

_pool: ThreadPoolExecutor | None = None


def default_threads() -> int:
    """Number of CPUs that this process may use, at most OMP_NUM_THREADS, which Ray sets to a worker's share."""
    cpus = usable_cpus()
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, min(cpus, int(limit))) if limit.isdigit() else cpus


def run_chunks(work: Callable[[int, int], None], count: int, block_bytes: int, threads: int | None) -> None:
    """Call `work(start, stop)` for consecutive parts of range(count), on at most `threads` threads.

    The calling thread is one of them. The first exception of a thread is raised.
    """
    chunk = max(1, _CHUNK_BYTES // block_bytes)
    starts = iter(range(0, count, chunk))

    def drain() -> None:
        for start in starts:
            work(start, min(start + chunk, count))

    thread_count = min(default_threads() if threads is None else threads, -(-count // chunk))
    helpers = [_shared_pool().submit(drain) for _ in range(thread_count - 1)]
    try:
        drain()
    finally:
        for helper in helpers:
            if not helper.cancel():  # a helper that has not started has nothing left to do
                helper.result()


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=max(32, os.cpu_count() or 1), thread_name_prefix="codec")
    return _pool


def _forget_pool() -> None:
    global _pool
    _pool = None  # its threads did not survive the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
