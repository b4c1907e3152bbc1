"""Compares the time of text searches between two checkouts of this repository.

    python -m benchmarks.search_side_by_side OLD NEW INDEX --queries captions.txt \\
        --old '{"dtype": "bfloat16"}' --new '{}' --new '{"joint_pool": 20}'

Each `--old` and `--new` is a way to search: a JSON object of options of `TokenIndex.open` (dtype) and of
`TokenIndex.search` (all others). Every way has a process of its own, and the processes take turns query by query, so
that other load affects all of them. The processes are restarted several times. The first way is the reference of all
ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.cli.search_queries import read_queries

_WARM_UP = 3
_WORKER = """
import json, sys, time
from edje_index import TokenIndex
job = json.loads(sys.argv[1])
options = {name: value for name, value in job["options"].items() if name != "dtype"}
dtype = {name: value for name, value in job["options"].items() if name == "dtype"}
index = TokenIndex.open(job["index"], job["model"], **dtype)
for line in sys.stdin:
    cpu, started = time.process_time(), time.perf_counter()
    index.search(json.loads(line), 10, job["pool"], **options)
    print(1e3 * (time.perf_counter() - started), 1e3 * (time.process_time() - cpu), flush=True)
"""


@dataclass(frozen=True)
class Way:
    """A way to search.

    Attributes:
        name: name in the results.
        checkout: directory of the checkout.
        options: options of `TokenIndex.open` and `TokenIndex.search`.
    """

    name: str
    checkout: Path
    options: dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """What every way searches for.

    Attributes:
        index: index that all checkouts can read.
        model: model bundle; None for the bundle that built the index.
        queries: texts; the first ones warm up each process.
        pool: candidates per query.
    """

    index: Path
    model: Path | None
    queries: Sequence[str]
    pool: int = 100


Times = list[tuple[float, float]]
"""Elapsed and processor milliseconds of each query."""


def measure(ways: Sequence[Way], workload: Workload, starts: int) -> dict[str, list[Times]]:
    """Return the times of each way by name, one list per start of the processes.

    Raises:
        RuntimeError: a checkout cannot search. Its error message is on standard error.
    """
    times: dict[str, list[Times]] = {way.name: [] for way in ways}
    for _ in range(starts):
        workers = {way.name: _start(way, workload) for way in ways}
        try:
            for name, of_start in _measure_once(workers, workload.queries).items():
                times[name].append(of_start)
        finally:
            for worker in workers.values():
                worker.terminate()
                worker.communicate()
    return times


def _measure_once(workers: dict[str, subprocess.Popen[str]], queries: Sequence[str]) -> dict[str, Times]:
    times: dict[str, Times] = {name: [] for name in workers}
    for number, query in enumerate([*queries[:_WARM_UP], *queries]):
        names = list(workers) if number % 2 else list(workers)[::-1]
        for name in names:
            elapsed = _search(workers[name], query)
            if number >= _WARM_UP:
                times[name].append(elapsed)
    return times


def table_lines(times: dict[str, list[Times]]) -> list[str]:
    """Return the lines of a Markdown table.

    For each start, the ratio is (median time of the reference) / (median time of the way). The table contains the
    median ratio over all starts.
    """
    lines = ["| search | p50 ms | processor ms | times faster | range |", "|---|---|---|---|---|"]
    reference = [_median(of_start) for of_start in next(iter(times.values()))]
    for name, starts in times.items():
        medians = [_median(of_start) for of_start in starts]
        ratios = [before[0] / after[0] for before, after in zip(reference, medians, strict=True)]
        elapsed, processor = (statistics.median(values) for values in zip(*medians, strict=True))
        figures = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"| {name} | {elapsed:.1f} | {processor:.1f} | {figures} |")
    return lines


def _median(times: Times) -> tuple[float, float]:
    elapsed, processor = (statistics.median(values) for values in zip(*times, strict=True))
    return elapsed, processor


def _start(way: Way, workload: Workload) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(way.checkout.resolve())}
    model = None if workload.model is None else str(workload.model.resolve())
    job = {"index": str(workload.index.resolve()), "model": model, "options": way.options, "pool": workload.pool}
    # -P: the working directory must not come before PYTHONPATH, or all workers would import the same checkout.
    command = [sys.executable, "-P", "-c", _WORKER, json.dumps(job)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _search(worker: subprocess.Popen[str], query: str) -> tuple[float, float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(query) + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError("a worker process ended early; its error message is on standard error")
    elapsed, processor = map(float, answer.split())
    return elapsed, processor


def main() -> None:
    """Measure every way to search, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old_checkout", type=Path, help="checkout to compare with")
    parser.add_argument("new_checkout", type=Path, help="checkout to measure")
    parser.add_argument("index", type=Path, help="index that both checkouts can read")
    parser.add_argument("--model", type=Path, help="bundle of the model that built the index")
    parser.add_argument("--queries", type=Path, required=True, help="file of queries, one per line")
    parser.add_argument("--count", type=int, default=30, help="number of queries")
    parser.add_argument("--pool", type=int, default=100, help="candidates per query")
    parser.add_argument("--starts", type=int, default=5, help="number of times that the processes are started")
    parser.add_argument("--old", type=json.loads, action="append", help="way to search in the old checkout; repeatable")
    parser.add_argument("--new", type=json.loads, action="append", help="way to search in the new checkout; repeatable")
    arguments = parser.parse_args()
    ways = [
        Way(f"{name} {json.dumps(options)}", checkout, options)
        for name, checkout, given in (
            ("old", arguments.old_checkout, arguments.old),
            ("new", arguments.new_checkout, arguments.new),
        )
        for options in given or [{}]
    ]
    queries = read_queries(arguments.queries)[: arguments.count]
    workload = Workload(arguments.index, arguments.model, queries, arguments.pool)
    print("\n".join(table_lines(measure(ways, workload, arguments.starts))))


if __name__ == "__main__":
    main()
