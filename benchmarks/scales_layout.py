"""Compares three layouts of FP4 records by random fetches with a cold page cache.

- `record`: codes and scales together on disk, 13,824 bytes per row, in four or five pages. Indexes use this layout.
- `memory`: codes on disk, 12,288 bytes per row, in three pages. All scales are in memory, 1,536 bytes per row.
- `padded`: codes and scales together on disk, padded to 16,384 bytes per row, in four pages.

The reads are made in the same way for all layouts. Records are not decoded.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.fetch.counters import Counters
from benchmarks.fetch.page_cache import evict
from pipelines.doctor.block_device import storage
from pipelines.environment import environment
from storage_formats.errors import EdjeError, UsageError

CODES, SCALES = 12_288, 1_536
RECORD = CODES + SCALES
_AHEAD = 256
_PIECE_ROWS = 4096
Say = Callable[[str], None]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Variant:
    """One layout of codes and scales.

    Attributes:
        name: name for reports.
        stride: bytes from the start of one record to the start of the next record.
        read: bytes to read per record.
        memory: bytes in memory per row.
    """

    name: str
    stride: int
    read: int
    memory: int


VARIANTS = (
    Variant("record", RECORD, RECORD, 0),
    Variant("memory", CODES, CODES, SCALES),
    Variant("padded", 16_384, RECORD, 0),
)


def bench_scales_layout(
    folder: Path, rows: int, blocks: int, repeats: int, say: Say = lambda _: None
) -> dict[str, Any]:
    """Fetch random rows with each layout alternately, with a cold page cache. All layouts fetch the same rows.

    Args:
        folder: folder for temporary files.
        rows: number of rows of each file.
        blocks: number of rows to fetch per run.
        repeats: number of runs of each layout.
        say: function that receives one line of text after each run.

    Returns:
        Results of each run, medians, and gigabytes of disk and memory per million images.

    Raises:
        UsageError: `blocks` is larger than `rows`.
        EdjeError: a file could not be evicted from the page cache.
    """
    if blocks > rows:
        raise UsageError(
            f"{blocks} different blocks cannot be fetched from {rows} rows; choose more rows or fewer blocks"
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = {variant: folder / f"bench-scales-{variant.name}" for variant in VARIANTS}
    runs: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in VARIANTS}
    out = np.zeros((blocks, RECORD), dtype=np.uint8)  # pages are touched before the timing
    out[:] = 1
    scales = np.random.default_rng(1).integers(0, 256, (rows, SCALES), dtype=np.uint8)
    try:
        for variant, path in files.items():
            say(f"writing {path.name}, {rows * variant.stride / 1e9:.1f} GB")
            _write(path, variant, rows)
        for turn in range(repeats):
            ids = np.sort(np.random.default_rng([2, turn]).choice(rows, blocks, replace=False))
            for variant, path in files.items():
                figures = _timed(path, variant, ids, scales, out)
                runs[variant.name].append(figures)
                say(f"run {turn + 1} of {repeats}, {variant.name}: {figures['us_per_block']:.1f} us per block")
        disk = storage(folder)
    finally:
        for path in files.values():
            path.unlink(missing_ok=True)
    return {
        "environment": {**environment(), "disk": disk},
        "settings": {"rows": rows, "blocks": blocks, "repeats": repeats, "ahead": _AHEAD},
        "runs": runs,
        "median": {name: _medians(variant_runs) for name, variant_runs in runs.items()},
        "per_million_images": {
            variant.name: {"disk_gb": variant.stride / 1e3, "memory_gb": variant.memory / 1e3} for variant in VARIANTS
        },
    }


def _write(path: Path, variant: Variant, rows: int) -> None:
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for first in range(0, rows, _PIECE_ROWS):
            file.write(rng.bytes(min(_PIECE_ROWS, rows - first) * variant.stride))
        file.flush()
        os.fsync(file.fileno())


def _timed(path: Path, variant: Variant, ids: NDArray[np.int64], scales: Bytes, out: Bytes) -> dict[str, float]:
    left = evict([path])
    if left > 0.01:
        raise EdjeError(f"{left:.0%} of {path} is still in the page cache; stop other processes that read this file")
    before = Counters.now(path)
    _fetch(path, variant, ids, out)
    if variant.memory:
        np.take(scales, ids, axis=0, out=out[:, CODES:], mode="clip")
    spent = Counters.now(path).since(before)
    seconds, cpu, read = (float(spent[name] or 0) for name in ("seconds", "cpu_seconds", "read_bytes"))
    return {
        "us_per_block": seconds / len(ids) * 1e6,
        "gb_per_s": len(ids) * RECORD / 1e9 / seconds,
        "cpu_us_per_block": cpu / len(ids) * 1e6,
        "bytes_read_per_block": read / len(ids),
        "resident_before": left,
    }


def _fetch(path: Path, variant: Variant, ids: NDArray[np.int64], out: Bytes) -> None:
    offsets = (ids * variant.stride).tolist()
    fd = os.open(path, os.O_RDONLY)
    try:
        for offset in offsets[:_AHEAD]:
            os.posix_fadvise(fd, offset, variant.read, os.POSIX_FADV_WILLNEED)
        for at, offset in enumerate(offsets):
            if at + _AHEAD < len(offsets):
                os.posix_fadvise(fd, offsets[at + _AHEAD], variant.read, os.POSIX_FADV_WILLNEED)
            if os.preadv(fd, [out[at, : variant.read].data], offset) != variant.read:
                raise EdjeError(f"{path} ends before the last of {len(ids)} records; repeat the benchmark")
    finally:
        os.close(fd)


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}
