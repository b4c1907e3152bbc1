"""Process that measures one run of one subject: `python -m benchmarks.fetch.worker` reads a job from standard input.

The job is a JSON object, see `run_worker`. The process prints its result as one line of JSON.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.disk import COLD, WARM, bytes_read, evict, load
from benchmarks.fetch.peers import SUBJECTS
from benchmarks.fetch.subjects import Entry, Ids, StoredRecords, Subject
from storage_formats.reading.memory import aligned_bytes

_IVF_PROBES = 32  # inverted lists per query, as in edje_index.indexing.faiss_index
_WARM_UP = 1024  # blocks of the warm-up call: enough to trigger imports and compilation of large calls
_CHECKED = 32  # blocks of the last call that are compared with plain reads
_READ_AT_LEAST = 0.9  # smallest fraction of the requested bytes that a cold run must read from the disk


class WorkerError(Exception):
    """A worker process failed or took too long."""


def run_worker(
    source: StoredRecords, folder: Path, entry: Entry, *, seed: int, max_seconds: float, prepare: bool = False
) -> dict[str, Any]:
    """Measure one run in a new process, and return the result of `measure`.

    Args:
        source: the records to fetch.
        folder: folder with the subject's copy of the records, if it reads a copy.
        entry: what to measure.
        seed: seed of the row ids.
        max_seconds: seconds after which no further call begins.
        prepare: True to write the copy instead of measuring.

    Raises:
        WorkerError: the process failed, or took far longer than `max_seconds`.
    """
    paths = {"root": str(source.root), "precision": source.precision, "folder": str(folder)}
    job = {**paths, "entry": asdict(entry), "seed": seed, "max_seconds": max_seconds, "prepare": prepare}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-m", "benchmarks.fetch.worker"]
    pipes: dict[str, Any] = {"input": json.dumps(job), "capture_output": True, "text": True, "env": environment}
    try:
        done = subprocess.run(command, **pipes, timeout=3600 if prepare else 10 * max_seconds + 720, check=False)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"the worker took more than {error.timeout:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise WorkerError(f"ended with code {done.returncode}: {lines[-1] if lines else 'no message'}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """Run the job from standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout, which must not look like an answer
    job = json.load(sys.stdin)
    entry = Entry(**job["entry"])
    subject = SUBJECTS[entry.subject](StoredRecords(Path(job["root"]), job["precision"]), Path(job["folder"]), entry)
    if job["prepare"]:
        subject.prepare()
        json.dump({}, answers)
    else:
        json.dump(measure(subject, entry, job["seed"], job["max_seconds"]), answers)


def measure(subject: Subject, entry: Entry, seed: int, max_seconds: float) -> dict[str, Any]:
    """Warm the libraries up, bring the page cache into the state of `entry`, and measure all calls.

    Returns:
        `discarded`: the reason why the run does not count, or None; `resident`: fraction of the subject's pages in the
        page cache right before the run. Unless the cache was in the wrong state: blocks, seconds, processor seconds,
        bytes read and requested, and the seconds of each call.
    """
    source = subject.source
    calls = [source.row_ids[positions] for positions in draw_calls(entry, len(source.row_ids), seed)]
    buffer = aligned_bytes(len(calls[0]) * subject.output_bytes).reshape(len(calls[0]), subject.output_bytes)
    buffer.fill(1)  # page faults of fresh memory would be measured as reading
    files = subject.files()
    subject.open()
    if entry.cache == "warm":
        load(files)
        for ids in calls:
            subject.fetch(ids, buffer[: len(ids)])
        resident = load(files) if files else None
    else:
        unused = np.setdiff1d(source.row_ids, np.concatenate(calls))  # rows that no timed call requests
        warm_up = np.random.default_rng(0).permutation(unused if len(unused) else calls[0])
        subject.fetch(warm_up[: len(buffer)][:_WARM_UP], buffer[: len(warm_up)][:_WARM_UP])
        subject.close()  # unmaps pages that could not be evicted
        subject.open()
        resident = evict(files)
    if resident is not None and entry.cache == "cold" and resident > COLD:
        return {"resident": resident, "discarded": f"not cold: {resident:.1%} of the pages could not be evicted"}
    if resident is not None and entry.cache == "warm" and resident < WARM:
        return {"resident": resident, "discarded": f"not warm: only {resident:.1%} of the pages are cached"}
    latencies: list[float] = []
    records = buffer
    read_before, cpu_before, started = bytes_read(), time.process_time(), time.perf_counter()
    for ids in calls:
        now = time.perf_counter()
        if latencies and now > started + max_seconds:
            break
        records = subject.fetch(ids, buffer[: len(ids)])
        latencies.append(time.perf_counter() - now)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_before
    read = bytes_read() - read_before
    last = calls[len(latencies) - 1][:_CHECKED]
    wrong = int((records[: len(last)] != subject.expected(last)).any(axis=1).sum())
    subject.close()
    requested = sum(map(len, calls[: len(latencies)])) * source.record_bytes
    discarded = None
    if wrong:
        discarded = f"failed: {wrong} of the checked blocks were wrong"
    elif entry.cache == "cold" and read < _READ_AT_LEAST * requested:
        discarded = f"not cold: only {read / requested:.0%} of the requested bytes were counted as read"
    return {
        "resident": resident,
        "discarded": discarded,
        "blocks": requested // source.record_bytes,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "read_bytes": read,
        "requested_bytes": requested,
        "latencies": [round(value, 7) for value in latencies],
    }


def draw_calls(entry: Entry, rows: int, seed: int) -> Sequence[Ids]:
    """Draw the rows of each call. A row is given by its position among all `rows` rows.

    Equal seeds give equal rows for all subjects. No row is drawn twice, so that a cold run does not read rows that
    earlier calls have cached.
    """
    rng = np.random.default_rng([seed, entry.blocks, entry.pool])
    if entry.pattern == "listed":  # a few lists of neighbouring rows per call; no two calls use the same list
        lists = min(rows, 4 * math.isqrt(rows))
        length = rows // lists
        probes = max(min(_IVF_PROBES, lists), math.ceil(entry.pool / length))
        order, calls = rng.permutation(lists), []
        for query in range(max(1, min(entry.blocks // entry.pool, lists // probes))):
            starts = order[query * probes : (query + 1) * probes] * length
            members = (starts[:, None] + np.arange(length)).reshape(-1)
            calls.append(rng.permutation(members)[: entry.pool].astype(np.int64))
        return calls
    blocks = min(entry.blocks, rows)
    if entry.pattern == "contiguous":
        ids = np.arange(blocks) + int(rng.integers(0, rows - blocks + 1))
    else:
        ids = rng.choice(rows, blocks, replace=False)
    return [ids[start : start + entry.pool].astype(np.int64) for start in range(0, blocks, entry.pool)]


if __name__ == "__main__":
    main()
