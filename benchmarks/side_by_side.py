"""Compares the speed of codecs and fetches in two checkouts of this repository, on the same blocks.

    python -m benchmarks.side_by_side OLD NEW --scratch /mnt/nvme/scratch
    python -m benchmarks.side_by_side OLD NEW --scratch /mnt/nvme/scratch --cold

Each checkout has one worker process. The workers run each task alternately, so that other load affects both workers.
The workers are started several times, because the memory layout of a process changes its speed by several percent.

The ratio of a task is the median over all starts of (old seconds / new seconds).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from benchmarks.synthetic import make_synthetic
from storage_formats import IndexSpec, precisions

_STORED = ("bf16", "fp8", "nvfp4")
_WORKER = """
import inspect, itertools, os, pathlib, sys, time
import ml_dtypes, numpy as np
from storage_formats import TokenStore, codec, precisions

root, clock, count, is_cold = sys.argv[1], getattr(time, sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "cold"
blocks = np.random.default_rng(0).standard_normal((count, 64, 384), np.float32).astype(ml_dtypes.bfloat16)
tasks, out = {}, np.empty_like(blocks)
def evict():
    for path in filter(pathlib.Path.is_file, pathlib.Path(root).rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
for name in precisions():
    if name != "bf16" and not is_cold:
        entry = codec(name)
        records = entry.encode(blocks)
        tasks["encode " + name] = lambda entry=entry: entry.encode(blocks, 1)
        tasks["decode " + name] = lambda entry=entry, records=records: entry.decode(records, out, 1)
checks = "verify_reads" in inspect.signature(TokenStore.open).parameters
variants = {"": {}, " unchecked": {"verify_reads": False} if checks else {}}
for name, variant in itertools.product(("bf16", "fp8", "nvfp4"), () if is_cold else variants):
    store = TokenStore.open(root, name, "mapped", **variants[variant])
    row_ids = np.random.default_rng(1).integers(0, len(store), len(store) // 2)
    half, small = store.empty(len(row_ids)), store.empty(100)
    tasks["fetch half " + name + variant] = lambda store=store, half=half: store.fetch(row_ids, out=half)
    tasks["fetch 100 " + name + variant] = lambda store=store, small=small: [
        store.fetch(row_ids[at : at + 100], out=small) for at in range(0, min(2000, len(row_ids) - 99), 100)
    ]
for task in tasks.values():
    task()
def seconds_of(task):
    started = clock()
    task()
    return clock() - started
def seconds_of_cold(label):
    _, _, name, *words = label.split()
    with TokenStore.open(root, name, **variants[" unchecked" if words else ""]) as store:
        out = store.empty(len(store) // 2)
        out[:] = 0  # so that the fetch takes no page faults in its destination
        store.fetch(np.arange(0, len(store), 64))  # opens every shard
        row_ids = np.random.default_rng().integers(0, len(store), len(out))
        evict()
        return seconds_of(lambda: store.fetch(row_ids, out=out))
print("ready", flush=True)
for line in sys.stdin:
    print(seconds_of_cold(line) if is_cold else seconds_of(tasks[line.strip()]), flush=True)
"""

Worker: TypeAlias = "subprocess.Popen[str]"


@dataclass(frozen=True)
class Options:
    """Settings of a comparison.

    Attributes:
        starts: number of times that both workers are started.
        rounds: number of measurements of each task per start.
        blocks: number of blocks of 64 x 384 to encode or decode.
        words: measure only tasks whose name contains this text; empty for all tasks.
        clock: name of a function in the module `time`: "perf_counter", or "process_time" on a machine with other load.
        cold: True to measure only fetches with a cold page cache.
    """

    starts: int
    rounds: int
    blocks: int = 1024
    words: str = ""
    clock: str = "perf_counter"
    cold: bool = False

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks to measure."""
        return [task for task in _tasks(self.cold) if self.words in task]


def write_index(root: Path, rows: int) -> None:
    """Write the index of random blocks from which both checkouts fetch."""
    make_synthetic(root, IndexSpec(rows, 1024, (64, 384), embed_dim=8, precisions=_STORED))


def measure(checkouts: tuple[Path, Path], root: Path, options: Options) -> dict[str, list[tuple[float, float]]]:
    """Return (median old seconds, median new seconds) of every start, by task.

    Raises:
        RuntimeError: a checkout cannot run the tasks. The error message of the worker is on standard error.
    """
    medians: dict[str, list[tuple[float, float]]] = {task: [] for task in options.tasks}
    for _ in range(options.starts):
        for task, pairs in _measure_once(checkouts, root, options).items():
            old, new = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
            medians[task].append((old, new))
    return medians


def _measure_once(checkouts: tuple[Path, Path], root: Path, options: Options) -> dict[str, list[tuple[float, float]]]:
    """Return (old seconds, new seconds) of every round, by task."""
    workers = [_start(checkout, root, options) for checkout in checkouts]
    try:
        for worker in workers:
            _answer(worker)
        seconds: dict[str, list[tuple[float, float]]] = {task: [] for task in options.tasks}
        for number in range(options.rounds):
            order = workers if number % 2 else workers[::-1]
            for task, pairs in seconds.items():
                by_worker = {worker.pid: _seconds(worker, task) for worker in order}
                pairs.append((by_worker[workers[0].pid], by_worker[workers[1].pid]))
        return seconds
    finally:
        for worker in workers:
            worker.terminate()
            worker.communicate()


def table_lines(seconds: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Return a Markdown table of the medians as lines, with one line per task."""
    lines = ["| task | old ms | new ms | old / new |", "|---|---|---|---|"]
    for task, pairs in seconds.items():
        old, new = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
        ratio = statistics.median(before / after for before, after in pairs)
        lines.append(f"| {task} | {old:.2f} | {new:.2f} | {ratio:.3f} |")
    return lines


def _tasks(cold: bool) -> list[str]:
    compiled = [name for name in precisions() if name != "bf16"]
    conversions = [f"{direction} {name}" for name in compiled for direction in ("encode", "decode")]
    variants = ("", " unchecked")  # an earlier checkout never compares checksums
    if cold:
        return [f"cold fetch {name}{variant}" for name in _STORED for variant in variants]
    fetches = [f"fetch {rows} {name}{variant}" for name in _STORED for variant in variants for rows in ("half", "100")]
    return [*conversions, *fetches]


def _start(checkout: Path, root: Path, options: Options) -> Worker:
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    # -P: the working directory must not come before PYTHONPATH, or both workers would import the same checkout.
    command = [sys.executable, "-P", "-c", _WORKER, str(root), options.clock, str(options.blocks)]
    command.append("cold" if options.cold else "warm")
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _seconds(worker: Worker, task: str) -> float:
    request = _pipe(worker.stdin)
    request.write(task + "\n")
    request.flush()
    return float(_answer(worker))


def _answer(worker: Worker) -> str:
    line = _pipe(worker.stdout).readline()
    if not line:
        raise RuntimeError("a worker process ended early; read the error message above")
    return line


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def main() -> None:
    """Measure both checkouts, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="Checkout to compare with.")
    parser.add_argument("new", type=Path, help="Checkout to measure.")
    parser.add_argument("--scratch", type=Path, required=True, help="Directory for an index of random blocks.")
    parser.add_argument("--starts", type=int, default=5, help="Number of times that both processes are started.")
    parser.add_argument("--rounds", type=int, default=7, help="Measurements of each task per start.")
    parser.add_argument("--tasks", default="", metavar="WORDS", help="Only tasks whose name contains WORDS.")
    parser.add_argument("--cold", action="store_true", help="Measure fetches with an empty page cache.")
    parser.add_argument("--cpu", action="store_true", help="Measure processor time, for a machine with other load.")
    arguments = parser.parse_args()
    root = arguments.scratch / "side-by-side.edje"
    if not root.exists():
        write_index(root, rows=8192)
    clock = "process_time" if arguments.cpu else "perf_counter"
    options = Options(arguments.starts, arguments.rounds, words=arguments.tasks, clock=clock, cold=arguments.cold)
    print("\n".join(table_lines(measure((arguments.old, arguments.new), root, options))))


if __name__ == "__main__":
    main()
