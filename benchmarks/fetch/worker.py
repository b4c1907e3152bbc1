"""One run of one subject, in a process of its own: `python -m benchmarks.fetch.worker`.

A job comes as a line of JSON on standard input. The worker opens everything, says that it is ready, waits for a line,
so that the page cache can be put in order meanwhile, runs, and answers with a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fetch.counters import Counters
from benchmarks.fetch.records import StoredRecords
from benchmarks.fetch.subjects import Subject, subject_class
from benchmarks.fetch.workloads import Ids, Workload, draw_calls
from storage_formats.codecs import Records
from storage_formats.reading.memory import aligned_bytes

_WARM_UP = 1024  # blocks: enough that whatever a large call alone imports or compiles is there
_CHECKED = 32  # blocks of the last call that are compared with plain reads


def main() -> None:
    """Serve one job."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not pass for an answer
    job = json.loads(sys.stdin.readline())
    source = StoredRecords(Path(job["root"]), job["precision"])
    subject = subject_class(job["subject"])(source, Path(job["folder"]), job["options"])
    if job["workload"] is None:
        subject.prepare()
        answer: dict[str, Any] = {}
    else:
        workload = Workload(**job["workload"])
        run = Run(subject, workload, draw_calls(workload, source.rows, job["seed"]), job["max_seconds"])
        run.warm_up()
        print(json.dumps({"ready": True}), file=answers, flush=True)
        if not sys.stdin.readline():
            return  # nobody waits any more
        answer = run.measure()
    print(json.dumps(answer), file=answers, flush=True)


class Run:
    """The calls of a workload, shared by its readers."""

    def __init__(self, subject: Subject, workload: Workload, calls: list[Ids], max_seconds: float) -> None:
        self._subject = subject
        self._workload = workload
        self._calls = calls
        self._max_seconds = max_seconds
        shape = (len(calls[0]), subject.output_bytes)
        self._buffers = [_touched(shape) for _ in range(workload.threads)]
        self._pool = ThreadPoolExecutor(workload.threads)

    def warm_up(self) -> None:
        """Import and compile what the first call would; leave no page mapped unless the run is a warm one."""
        self._subject.open()
        if self._workload.cache == "warm":
            self._run()
            return
        ids = self._others()
        self._subject.fetch(ids, self._buffers[0][: len(ids)])
        self._subject.close()
        self._subject.open()

    def _others(self) -> Ids:
        """Rows that no call asks for: what a host or a drive has cached of them helps no run."""
        count = min(_WARM_UP, len(self._calls[0]))
        others = np.setdiff1d(np.arange(self._subject.source.rows), np.concatenate(self._calls))
        chosen: Ids = np.random.default_rng(0).permutation(others)[:count]
        return chosen if len(chosen) else self._calls[0][:count]

    def measure(self) -> dict[str, Any]:
        """Cost of the calls, seconds of each, and how many of the checked blocks were wrong."""
        root = self._subject.source.root
        before = Counters.now(root)
        shares = self._run()
        cost = Counters.now(root).since(before)
        fetched = np.concatenate([ids for share in shares for ids in share.calls])
        asked, pages = self._subject.source.asked_bytes(fetched)
        first = shares[0]
        checked = first.calls[-1][:_CHECKED]
        wrong = (first.found[: len(checked)] != self._subject.expected(checked)).any(axis=1)
        self._subject.close()
        found = {"blocks": len(fetched), "asked_bytes": asked, "page_bytes": pages, "wrong_blocks": int(wrong.sum())}
        return {**cost, **found, "latencies": [round(value, 7) for share in shares for value in share.seconds]}

    def _run(self) -> list[_Share]:
        """What each reader did; the first has at least one call."""
        deadline = time.perf_counter() + self._max_seconds
        readers = self._workload.threads
        parts = [self._calls[reader::readers] for reader in range(readers)]
        return list(self._pool.map(self._read, parts, self._buffers, [deadline] * readers))

    def _read(self, calls: list[Ids], buffer: Records, deadline: float) -> _Share:
        """One reader's calls, until they are done or time is up; always the first."""
        seconds: list[float] = []
        found = buffer[:0]
        for ids in calls:
            started = time.perf_counter()
            if seconds and started > deadline:
                break
            found = self._subject.fetch(ids, buffer[: len(ids)])
            seconds.append(time.perf_counter() - started)
        return _Share(seconds, calls[: len(seconds)], found)


def _touched(shape: tuple[int, int]) -> Records:
    """Memory from a page on, all of it there: what every subject reads into."""
    buffer = aligned_bytes(shape[0] * shape[1]).reshape(shape)
    buffer.fill(1)
    return buffer


@dataclass(frozen=True)
class _Share:
    """What one reader did: seconds and ids of each call, and what the last of them gave."""

    seconds: list[float]
    calls: list[Ids]
    found: Records


if __name__ == "__main__":
    main()
