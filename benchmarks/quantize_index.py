"""Compares `edje-index quantize` with `cp` on the same disk. Runs start with a cold page cache and end with fsync.

`cp` copies the token files that `quantize` reads. Rates count the bytes that are read plus the bytes that are written.
Two durations of `quantize` are measured: with and without process start-up.
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

from benchmarks.fetch.page_cache import evict
from benchmarks.synthetic import make_synthetic
from pipelines.doctor.block_device import storage
from pipelines.environment import environment
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import Manifest

BLOCK_SHAPE = (64, 384)
_TARGET_RATIO = 0.7
Say = Callable[[str], None]
Moved: TypeAlias = tuple[int, float | None]
"""Bytes read and written, and the seconds that the program reports. The seconds are None if it reports no time."""


@dataclass(frozen=True)
class QuantizeBench:
    """Settings of `bench_quantize_index`.

    Attributes:
        folder: folder for temporary files. The disk of this folder is measured.
        rows: number of random blocks in the index.
        to: precision to convert to.
        engine: execution engine of `quantize`.
        workers: number of workers of `quantize`.
        repeats: number of runs of `quantize` and of `cp`.
    """

    folder: Path
    rows: int
    to: str = "fp8"
    engine: str = "inline"
    workers: int = 2
    repeats: int = 5


def bench_quantize_index(bench: QuantizeBench, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure all runs. Return seconds, GB/s, medians, and the median ratios of `quantize` to `cp`.

    Raises:
        UsageError: `bench.to` is bf16, the precision of the index.
        EdjeError: `quantize` failed, or the files could not be evicted from the page cache.
    """
    if bench.to == "bf16":
        raise UsageError("the index of this benchmark already contains bf16; choose another precision")
    root, copy = bench.folder / "bench-quantize.edje", bench.folder / "bench-quantize-copy"
    for path in (root, copy):
        shutil.rmtree(path, ignore_errors=True)
    try:
        say(f"writing {bench.rows:,} random blocks")
        make_synthetic(root, IndexSpec(bench.rows, 1024, BLOCK_SHAPE, embed_dim=8))
        _quantize(bench, root)  # compiles the kernels
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
    rates = {name: [run["gb_per_s"] for run in subject_runs] for name, subject_runs in runs.items()}
    rates["quantize with start"] = [run["bytes"] / 1e9 / run["wall_seconds"] for run in runs["quantize"]]
    peer = rates["cp"]
    return {
        "environment": {**environment(), "disk": disk},
        "settings": {**asdict(bench), "folder": bench.folder.name, "block_shape": BLOCK_SHAPE},
        "runs": runs,
        "median_gb_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "ratios": {
            f"{name} / cp": statistics.median(rate / copy for rate, copy in zip(values, peer, strict=True))
            for name, values in rates.items()
            if name != "cp"
        },
        "target": _TARGET_RATIO,
    }


def _timed(work: Callable[[], Moved], bench: QuantizeBench, root: Path, copy: Path) -> dict[str, float]:
    shutil.rmtree(copy, ignore_errors=True)
    if bench.to in Manifest.load(root).spec.precisions:
        _command("quantize", root, "--to", "bf16", "--drop", bench.to)
    subprocess.run(["sync"], check=True)
    left = evict(_sources(root))
    if left > 0.01:
        raise EdjeError(
            f"{left:.0%} of the source files are still in the page cache; stop other processes that read these files"
        )
    started = time.perf_counter()
    moved, reported_seconds = work()
    wall = time.perf_counter() - started
    seconds = reported_seconds or wall
    rate = moved / 1e9 / seconds
    return {"seconds": seconds, "wall_seconds": wall, "bytes": moved, "gb_per_s": rate, "resident_before": left}


def _quantize(bench: QuantizeBench, root: Path) -> Moved:
    options = ["--engine", bench.engine]
    if bench.engine == "ray":
        options += ["--workers", str(bench.workers)]
    result = _command("quantize", root, "--to", bench.to, *options)
    return _size(_sources(root)) + _size(Layout(root).token_array(bench.to).iterdir()), result["seconds"]


def _command(*arguments: str | Path) -> dict[str, Any]:
    """Run `edje-index` in a new process, and return the JSON that the command prints."""
    command = [sys.executable, "-m", "pipelines.cli", *map(str, arguments), "--quiet", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EdjeError(f"the command '{' '.join(command)}' failed: {done.stderr.strip()}")
    output: dict[str, Any] = json.loads(done.stdout)
    return output


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
