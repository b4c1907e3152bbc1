"""Process that runs one subject: `python -m benchmarks.fetch.worker`.

The worker reads a job, one line of JSON, from standard input. It warms up the subject and prints a ready message. It
waits for another input line before it starts the run. It then prints the results as one line of JSON.
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

_WARM_UP = 1024  # blocks of the warm-up call: enough to trigger imports and compilation of large calls
_CHECKED = 32  # blocks of the first reader's last call that are compared with plain reads


def main() -> None:
    """Run one job from standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout, which must not look like an answer
    job = json.loads(sys.stdin.readline())
    source = StoredRecords(Path(job["root"]), job["precision"])
    subject = subject_class(job["subject"])(source, Path(job["folder"]), job["options"])
    if job["workload"] is None:
        subject.prepare()
        answer: dict[str, Any] = {}
    else:
        workload = Workload(**job["workload"])
        calls = [source.row_ids[positions] for positions in draw_calls(workload, source.rows, job["seed"])]
        run = Run(subject, workload, calls, job["max_seconds"])
        run.warm_up()
        print(json.dumps({"ready": True}), file=answers, flush=True)
        if not sys.stdin.readline():
            return  # the parent process has ended
        answer = run.measure()
    print(json.dumps(answer), file=answers, flush=True)


class Run:
    """The calls of a workload, split among several reader threads."""

    def __init__(self, subject: Subject, workload: Workload, calls: list[Ids], max_seconds: float) -> None:
        self._subject = subject
        self._workload = workload
        self._calls = calls
        self._max_seconds = max_seconds
        shape = (len(calls[0]), subject.output_bytes)
        self._buffers = [_touched(shape) for _ in range(workload.threads)]
        self._pool = ThreadPoolExecutor(workload.threads)

    def warm_up(self) -> None:
        """Make a call, so that the timed calls do not import or compile anything."""
        self._subject.open()
        if self._workload.cache == "warm":
            self._run()
            return
        ids = self._unused_rows()
        self._subject.fetch(ids, self._buffers[0][: len(ids)])
        self._subject.close()
        self._subject.open()

    def _unused_rows(self) -> Ids:
        """Return rows that no timed call requests, for the warm-up."""
        count = min(_WARM_UP, len(self._calls[0]))
        unused = np.setdiff1d(self._subject.source.row_ids, np.concatenate(self._calls))
        chosen: Ids = np.random.default_rng(0).permutation(unused)[:count]
        return chosen if len(chosen) else self._calls[0][:count]

    def measure(self) -> dict[str, Any]:
        """Run all calls. Return costs, latencies, and the number of wrong blocks among the checked blocks."""
        root = self._subject.source.root
        before = Counters.now(root)
        shares = self._run()
        cost = Counters.now(root).since(before)
        fetched = np.concatenate([ids for share in shares for ids in share.calls])
        requested, pages = self._subject.source.requested_bytes(fetched)
        first = shares[0]
        checked = first.calls[-1][:_CHECKED]
        wrong = (first.records[: len(checked)] != self._subject.expected(checked)).any(axis=1)
        self._subject.close()
        counts = {
            "blocks": len(fetched),
            "requested_bytes": requested,
            "page_bytes": pages,
            "wrong_blocks": int(wrong.sum()),
        }
        return {**cost, **counts, "latencies": [round(value, 7) for share in shares for value in share.seconds]}

    def _run(self) -> list[_Share]:
        deadline = time.perf_counter() + self._max_seconds
        readers = self._workload.threads
        parts = [self._calls[reader::readers] for reader in range(readers)]
        return list(self._pool.map(self._read, parts, self._buffers, [deadline] * readers))

    def _read(self, calls: list[Ids], buffer: Records, deadline: float) -> _Share:
        """Make the calls of one reader thread. Stop at the deadline."""
        seconds: list[float] = []
        records = buffer[:0]
        for ids in calls:
            started = time.perf_counter()
            if seconds and started > deadline:
                break
            records = self._subject.fetch(ids, buffer[: len(ids)])
            seconds.append(time.perf_counter() - started)
        return _Share(seconds, calls[: len(seconds)], records)


def _touched(shape: tuple[int, int]) -> Records:
    """Return page-aligned memory in which every page has been written."""
    buffer = aligned_bytes(shape[0] * shape[1]).reshape(shape)
    buffer.fill(1)
    return buffer


@dataclass(frozen=True)
class _Share:
    """The calls of one reader thread: seconds and row ids of each call, and the records that the last call returned."""

    seconds: list[float]
    calls: list[Ids]
    records: Records


if __name__ == "__main__":
    main()
