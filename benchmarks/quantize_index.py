"""`quantize` of a whole index beside `cp`: the same disk, cold, in turn, each ending with its bytes on the device.

`cp` copies the token files of the precision that is read. Bytes moved are those read and those written: for `cp` twice
the size of its files, for `quantize` the source and what it makes of it. The rate of `cp` is thus what the disk gives
to a program that only moves bytes. `quantize` is timed by itself, from the index's manifest to the last fsync, and
with the start of its process, which does not grow with the index.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.environment import environment, storage
from benchmarks.fetch.page_cache import evict
from benchmarks.synthetic import make_synthetic
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import Manifest

BLOCK_SHAPE = (64, 384)
_BAR = 0.7
Say = Callable[[str], None]
Moved: TypeAlias = tuple[int, float | None]
"""Bytes read and written; seconds, where the subject took its own time."""


@dataclass(frozen=True)
class QuantizeBench:
    """What to measure.

    Attributes:
        folder: on the disk to measure; a folder of its own is made there and removed.
        rows: of an index of random blocks.
        to: precision to make.
        engine, workers: of `quantize`.
        repeats: runs of each, by turns.
    """

    folder: Path
    rows: int
    to: str = "fp8"
    engine: str = "inline"
    workers: int = 2
    repeats: int = 5


def bench_quantize_index(bench: QuantizeBench, say: Say = lambda _: None) -> dict[str, Any]:
    """Seconds and GB/s of each run, medians, and the median ratio of neighbouring runs.

    Raises:
        UsageError: `to` is the precision that the index has already.
        EdjeError: `quantize` failed, or the files would not leave the page cache.
    """
    if bench.to == "bf16":
        raise UsageError("the index is of bf16: name another precision to make of it")
    root, copy = bench.folder / "bench-quantize.edje", bench.folder / "bench-quantize-copy"
    for path in (root, copy):
        shutil.rmtree(path, ignore_errors=True)
    try:
        say(f"writing {bench.rows:,} random blocks")
        make_synthetic(root, IndexSpec(bench.rows, 1024, BLOCK_SHAPE, embed_dim=8))
        _quantize(bench, root)  # compiles
        subjects: dict[str, Callable[[], Moved]] = {
            "quantize": lambda: _quantize(bench, root),
            "cp": lambda: _copy(root, copy),
        }
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
        for turn in range(bench.repeats):
            for name, work in subjects.items():
                runs[name].append(_timed(work, bench, root, copy))
                say(f"run {turn + 1} of {bench.repeats}, {name}: {runs[name][-1]['gb_per_s']:.2f} GB/s")
        disk = storage(root)
    finally:
        for path in (root, copy):
            shutil.rmtree(path, ignore_errors=True)
    rates = {name: [run["gb_per_s"] for run in found] for name, found in runs.items()}
    rates["quantize with start"] = [run["bytes"] / 1e9 / run["wall_seconds"] for run in runs["quantize"]]
    peer = rates["cp"]
    return {
        "environment": {**environment(), "disk": disk},
        "settings": {**asdict(bench), "folder": str(bench.folder), "block_shape": BLOCK_SHAPE},
        "runs": runs,
        "median_gb_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "ratios": {
            f"{name} / cp": statistics.median(ours / other for ours, other in zip(found, peer, strict=True))
            for name, found in rates.items()
            if name != "cp"
        },
        "bar": _BAR,
    }


def _timed(work: Callable[[], Moved], bench: QuantizeBench, root: Path, copy: Path) -> dict[str, float]:
    """One cold run: nothing of the subjects before is left, on the disk or to be written."""
    shutil.rmtree(copy, ignore_errors=True)
    if bench.to in Manifest.load(root).spec.precisions:
        _command("quantize", root, "--to", "bf16", "--drop", bench.to)
    subprocess.run(["sync"], check=True)
    left = evict(_sources(root))
    if left > 0.01:
        raise EdjeError(f"{left:.0%} of the files stay in the page cache; end what reads them")
    started = time.perf_counter()
    moved, own = work()
    wall = time.perf_counter() - started
    seconds = own or wall
    rate = moved / 1e9 / seconds
    return {"seconds": seconds, "wall_seconds": wall, "bytes": moved, "gb_per_s": rate, "resident_before": left}


def _quantize(bench: QuantizeBench, root: Path) -> Moved:
    options = ["--engine", bench.engine]
    if bench.engine == "ray":
        options += ["--workers", str(bench.workers)]
    result = _command("quantize", root, "--to", bench.to, *options)
    return _size(_sources(root)) + _size(Layout(root).token_array(bench.to).iterdir()), result["seconds"]


def _command(*arguments: str | Path) -> dict[str, Any]:
    """Run `edje-index` in a process of its own and return what it says."""
    command = [sys.executable, "-m", "pipelines.cli", *map(str, arguments), "--quiet", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EdjeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def _copy(root: Path, copy: Path) -> Moved:
    copy.mkdir()
    files = _sources(root)
    subprocess.run(["cp", *map(str, files), str(copy)], check=True)
    subprocess.run(["sync", "--file-system", str(copy)], check=True)
    return 2 * _size(files), None


def _sources(root: Path) -> list[Path]:
    return sorted(Layout(root).token_array("bf16").glob("c.*"))


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)
