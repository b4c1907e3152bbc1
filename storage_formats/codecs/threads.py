"""Runs encoding and decoding on several threads.

This module does not use the thread pools of Numba, because they abort a process that forks or calls them from two
threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from storage_formats.cpus import usable_cpus
from storage_formats.crew import Crew
from storage_formats.interrupts import settle, unsettled

_CHUNK_BYTES = 2 << 20  # of bfloat16: about 0.3 ms of work, much longer than handing it to a thread


def default_threads() -> int:
    """Return the number of CPUs that this process may use, at most the value of `$OMP_NUM_THREADS`."""
    cpus = usable_cpus()
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, min(cpus, int(limit))) if limit.isdigit() else cpus


def run_chunks(work: Callable[[int, int], None], count: int, block_bytes: int, threads: int | None) -> None:
    """Split range(count) into consecutive parts and call `work(start, stop)` for each part.

    If a call raises, the first exception is raised after all calls have ended.

    Args:
        work: function `(start, stop)` that converts blocks [start, stop).
        count: number of blocks.
        block_bytes: length of one decoded block in bytes. This length determines the number of parts.
        threads: maximum number of threads, including the calling thread. None means `default_threads()`.
    """
    limit = default_threads() if threads is None else threads
    chunk_count = max(1, -(-count * block_bytes // _CHUNK_BYTES))
    chunk_count += -chunk_count % min(limit, chunk_count)  # the same number for each thread
    chunk = max(1, -(-count // chunk_count))
    starts = range(0, count, chunk)
    thread_count = min(limit, len(starts))
    if thread_count < 2:
        for start in starts:
            work(start, min(start + chunk, count))
        return
    pending = unsettled()
    crew = Crew(lambda start: work(start, min(start + chunk, count)), starts)
    try:
        crew.start(thread_count - 1)
        crew.finish()
    except BaseException:
        pending.append(crew.abandon)
        settle(pending)
        raise
