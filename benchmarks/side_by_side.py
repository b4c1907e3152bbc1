"""Codecs and warm fetches of two checkouts of this repository, measured in turn on the same blocks.

    python -m benchmarks.side_by_side OLD NEW --scratch /mnt/nvme/scratch

Each checkout runs in a process of its own. The two processes take turns task by task, so that a change in the load of
the machine affects both. The ratio of a task is the median over the rounds of old seconds / new seconds.
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

_ROWS = 8192
_STORED = ("bf16", "fp8", "nvfp4")
_WORKER = """
import sys, time
import ml_dtypes, numpy as np
from storage_formats import TokenStore, codec

root, clock = sys.argv[1], getattr(time, sys.argv[2])
blocks = np.random.default_rng(0).standard_normal((1024, 64, 384), np.float32).astype(ml_dtypes.bfloat16)
row_ids = np.random.default_rng(1).integers(0, 8192, 4096)
stores, tasks, out = {}, {}, np.empty_like(blocks)
for name in ("fp16", "int8", "fp8", "mxfp8", "nvfp4", "mxfp4", "sign1"):
    entry = codec(name)
    records = entry.encode(blocks)
    tasks["encode " + name] = lambda entry=entry: entry.encode(blocks, 1)
    tasks["decode " + name] = lambda entry=entry, records=records: entry.decode(records, out, 1)
for name in ("bf16", "fp8", "nvfp4"):
    store = stores[name] = TokenStore.open(root, name, "mapped")
    large, small = store.empty(4096), store.empty(100)
    tasks["fetch 4096 " + name] = lambda store=store, large=large: store.fetch(row_ids, out=large)
    tasks["fetch 100 " + name] = lambda store=store, small=small: [
        store.fetch(row_ids[at : at + 100], out=small) for at in range(0, 2000, 100)
    ]
for task in tasks.values():
    task()
print("ready", flush=True)
for line in sys.stdin:
    started = clock()
    tasks[line.strip()]()
    print(clock() - started, flush=True)
"""

Worker: TypeAlias = "subprocess.Popen[str]"


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        rounds: measurements of each task.
        words: measure only tasks whose name contains them.
        clock: function of `time`: `perf_counter`, or `process_time` on a machine with other load.
    """

    rounds: int
    words: str
    clock: str


def measure(checkouts: tuple[Path, Path], root: Path, options: Options) -> dict[str, list[tuple[float, float]]]:
    """(old seconds, new seconds) of every round, for each task."""
    workers = [_start(checkout, root, options.clock) for checkout in checkouts]
    try:
        for worker in workers:
            _pipe(worker.stdout).readline()
        seconds: dict[str, list[tuple[float, float]]] = {task: [] for task in _tasks() if options.words in task}
        for number in range(options.rounds):
            order = workers if number % 2 else workers[::-1]
            for task, pairs in seconds.items():
                by_worker = {worker.pid: _seconds(worker, task) for worker in order}
                pairs.append((by_worker[workers[0].pid], by_worker[workers[1].pid]))
        return seconds
    finally:
        for worker in workers:
            worker.terminate()


def _tasks() -> list[str]:
    compiled = [name for name in precisions() if name != "bf16"]
    conversions = [f"{direction} {name}" for name in compiled for direction in ("encode", "decode")]
    return [*conversions, *(f"fetch {count} {name}" for name in _STORED for count in (4096, 100))]


def _start(checkout: Path, root: Path, clock: str) -> Worker:
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    command = [sys.executable, "-c", _WORKER, str(root), clock]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _seconds(worker: Worker, task: str) -> float:
    request = _pipe(worker.stdin)
    request.write(task + "\n")
    request.flush()
    return float(_pipe(worker.stdout).readline())


def main() -> None:
    """Print one Markdown table line per task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--scratch", type=Path, required=True, help="Directory for an index of random blocks.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tasks", default="", metavar="WORDS", help="Only tasks whose name contains WORDS.")
    parser.add_argument(
        "--cpu", action="store_true", help="Measure processor time instead of time, for a busy machine."
    )
    arguments = parser.parse_args()
    root = arguments.scratch / "side-by-side.edje"
    if not root.exists():
        make_synthetic(root, IndexSpec(_ROWS, 1024, (64, 384), embed_dim=8, precisions=_STORED))
    options = Options(arguments.rounds, arguments.tasks, "process_time" if arguments.cpu else "perf_counter")
    print("| task | old ms | new ms | old / new |\n|---|---|---|---|")
    for task, pairs in measure((arguments.old, arguments.new), root, options).items():
        old, new = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
        ratio = statistics.median(before / after for before, after in pairs)
        print(f"| {task} | {old:.2f} | {new:.2f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
