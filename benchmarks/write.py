"""Compares the shard writer with zarr-python and `dd`, on the same blocks and disk.

Each measurement ends when all bytes are on the disk.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.environment import environment
from storage_formats.atomic import fsync_paths
from storage_formats.codecs import BF16, Blocks
from storage_formats.format.layout import IndexSpec
from storage_formats.format.rows import RowEntry, rows_table
from storage_formats.writing.begin import begin_index
from storage_formats.writing.shard_writer import ShardWriter

BLOCK_SHAPE = (64, 384)
BATCH = 256


def bench_write(folder: Path, rows: int, shard_size: int, repeats: int) -> dict[str, Any]:
    """Write `rows` BF16 blocks to `folder` with each writer, `repeats` times. Return GB/s and median ratios."""
    spec = IndexSpec(rows, shard_size, BLOCK_SHAPE, embed_dim=384)
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((BATCH, *BLOCK_SHAPE), dtype=np.float32).astype(BF16)
    subjects: dict[str, Callable[[Path], None]] = {
        "edje": _edje(spec, blocks),
        "zarr-python": _zarr_python(spec, blocks),
        "dd direct": lambda path: _dd(path, rows, "oflag=direct"),
        "dd fsync": lambda path: _dd(path, rows, "conv=fsync"),
    }
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, write in subjects.items():
            rates[name].append(rows * blocks[0].nbytes / 1e9 / _timed(write, folder / "subject"))
    ratios = {
        f"edje / {name}": statistics.median(edje / peer for edje, peer in zip(rates["edje"], rates[name], strict=True))
        for name in subjects
        if name != "edje"
    }
    medians = {name: statistics.median(values) for name, values in rates.items()}
    settings = {"rows": rows, "shard_size": shard_size, "block_shape": BLOCK_SHAPE, "repeats": repeats}
    return {"environment": environment(), "settings": settings, "gb_per_s": rates, "median": medians, "ratios": ratios}


def _timed(write: Callable[[Path], None], path: Path) -> float:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    os.sync()  # writes left by earlier runs must not count in this one
    started = time.perf_counter()
    write(path)
    seconds = time.perf_counter() - started
    shutil.rmtree(path)
    return seconds


def _edje(spec: IndexSpec, blocks: Blocks) -> Callable[[Path], None]:
    embeddings = np.ones((BATCH, spec.embed_dim), dtype=np.float32)
    tables = [
        rows_table([RowEntry(row, f"/photos/{row:08d}.jpg") for row in spec.shard_rows(shard)])
        for shard in range(spec.shards)
    ]

    def write(root: Path) -> None:
        begin_index(root, spec)
        for shard in range(spec.shards):
            count = len(spec.shard_rows(shard))
            with ShardWriter(root, spec, shard) as writer:
                for start in range(0, count, BATCH):
                    positions = np.arange(start, min(start + BATCH, count))
                    writer.put(positions, blocks[: len(positions)], embeddings[: len(positions)])
                writer.commit(tables[shard], "bench", {})

    return write


def _zarr_python(spec: IndexSpec, blocks: Blocks) -> Callable[[Path], None]:
    """Return a function that writes with zarr-python, one whole shard at a time.

    Smaller writes would rewrite the shard.
    """
    import zarr

    def write(root: Path) -> None:
        array = zarr.create_array(
            str(root / "array"),
            shape=(spec.rows, *BLOCK_SHAPE),
            shards=(spec.shard_size, *BLOCK_SHAPE),
            chunks=(1, *BLOCK_SHAPE),
            dtype="uint16",
            compressors=None,
            fill_value=0x7FC0,
        )
        for shard in range(spec.shards):
            rows = spec.shard_rows(shard)
            source = np.resize(blocks.view(np.uint16), (len(rows), *BLOCK_SHAPE))
            array[rows.start : rows.stop] = source
        fsync_paths(path for path in root.rglob("*"))

    return write


def _dd(path: Path, rows: int, flag: str) -> None:
    total = rows * BLOCK_SHAPE[0] * BLOCK_SHAPE[1] * 2
    size = 12 << 20
    command = ["dd", "if=/dev/zero", f"of={path / 'file'}", f"bs={size}", f"count={-(-total // size)}", flag]
    subprocess.run(command, check=True, capture_output=True)
