"""Python threads for conversions, which release the GIL.

Numba's own thread pools are not used: they abort the process if two threads call at once (workqueue) or after a fork
(OpenMP), and stores are read from many threads in processes that fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from storage_formats.cpus import usable_cpus
from storage_formats.crew import Crew
from storage_formats.interrupts import settle, unsettled

_CHUNK_BYTES = 2 << 20  # of bfloat16: about 0.3 ms of work, much longer than handing it to a thread


def default_threads() -> int:
    """Number of CPUs that this process may use, at most OMP_NUM_THREADS, which Ray sets to a worker's share."""
    cpus = usable_cpus()
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, min(cpus, int(limit))) if limit.isdigit() else cpus


def run_chunks(work: Callable[[int, int], None], count: int, block_bytes: int, threads: int | None) -> None:
    """Call `work(start, stop)` for consecutive parts of range(count), on at most `threads` threads.

    The calling thread is one of them. The first exception of a thread is raised. No thread works any more when this
    returns or raises.
    """
    limit = default_threads() if threads is None else threads
    chunk_count = max(1, -(-count * block_bytes // _CHUNK_BYTES))
    chunk_count += -chunk_count % min(limit, chunk_count)  # as many for each thread
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
