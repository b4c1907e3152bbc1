"""Measures how long it takes to plan a build, and to open, read and change an index of up to a billion rows.

The manifest and the shard table list all shards, but only the shards that the steps read have files. These files are
sparse and contain zeros. Each step runs in a new process, so that its peak memory can be measured.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.steps import answer_step, run_step
from pipelines.environment import environment
from pipelines.planning.config import BuildConfig
from pipelines.planning.inputs import check_frozen_inputs, freeze_inputs
from pipelines.planning.plan import BuildPlan, BuildSettings, read_plan
from storage_formats.atomic import write_bytes_atomic
from storage_formats.codecs import BF16, codec
from storage_formats.errors import UsageError
from storage_formats.format.checksum import crc32c, crc32c_rows
from storage_formats.format.layout import IndexSpec, Layout, Segment, padded_shard_bytes
from storage_formats.format.manifest import CommittedIndex, Counts, Manifest, created_by
from storage_formats.format.rows import RowEntry, rows_table
from storage_formats.format.shard_table import SHARD_TABLE_SCHEMA, FileEntry, write_shard_table
from storage_formats.token_store import TokenStore
from storage_formats.writing.begin import begin_index
from storage_formats.writing.publish import add_counts
from storage_formats.writing.shard_writer import ShardWriter
from storage_formats.writing.snapshots import commit_deletion, commit_snapshot, plan_deletion

_MODULE = "benchmarks.scale"
_SHARD_SIZE = 1024
_BLOCK_SHAPE = (64, 384)
_PRECISION = "fp8"
_TABLE_GROUP_LINES = 4096
_FETCHED = 100
_DELETED = 1000


def bench_scale(folder: Path, rows: tuple[int, ...]) -> dict[str, Any]:
    """Run all steps for each number in `rows`, with an index in `folder`. The folder is removed at the end.

    Raises:
        UsageError: `folder` exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} exists and is not empty; choose a new folder", parameter="folder")
    report: dict[str, Any] = {"environment": environment(), "rows": {}}
    try:
        for count in rows:
            root = folder / str(count)
            write_sparse(root, count)
            report["rows"][count] = {step: run_step(_MODULE, step, root) for step in STEPS}
            shutil.rmtree(root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def write_sparse(root: Path, rows: int) -> None:
    """Write the metadata of an index with `rows` rows, and the files of the shards that the steps read."""
    spec = IndexSpec(rows, _SHARD_SIZE, _BLOCK_SHAPE, _BLOCK_SHAPE[1], (_PRECISION,))
    begin_index(root, spec)
    layout = Layout(root)
    record_bytes = codec(_PRECISION, _BLOCK_SHAPE).record_bytes
    crc = crc32c_rows(np.zeros((1, record_bytes), dtype=np.uint8))
    content = np.repeat(crc.astype("<u4"), _SHARD_SIZE).tobytes()
    token_bytes = padded_shard_bytes(_SHARD_SIZE, _SHARD_SIZE, record_bytes)[1]
    for shard in {0, spec.shards - 1, *(int(row) // _SHARD_SIZE for row in fetched_rows(rows))}:
        length = padded_shard_bytes(len(spec.shard_rows(shard)), _SHARD_SIZE, record_bytes)[1]
        _write_sparse_file(layout.token_shard(_PRECISION, shard, 1), length)
        path = layout.checksums(_PRECISION, shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    table = _write_table(layout, spec, [token_bytes, len(content)], [0, crc32c(content)])
    counts, model = Counts(rows, rows, 0), {"fingerprint": "synthetic"}
    Manifest(spec, counts, model, {}, "plan", table, {"kind": "none"}, created_by()).write(layout)


def fetched_rows(rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the row ids that the step `fetch` reads.

    No row id is in the last shard if that shard is shorter than the others.
    """
    full = rows // _SHARD_SIZE * _SHARD_SIZE
    return np.random.default_rng(0).integers(0, full, _FETCHED)


def _write_sparse_file(path: Path, length: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(length)


def _write_table(layout: Layout, spec: IndexSpec, lengths: list[int], checksums: list[int]) -> FileEntry:
    """Write a shard table with two lines per shard: one for the token file, one for the checksum file."""
    names = [layout.relative(layout.token_shard(_PRECISION, 0, 1)), layout.relative(layout.checksums(_PRECISION, 0))]
    parts = [names[0].partition("c.0"), names[1].partition("00000000")]
    forms = ["{head}c.{shard}{tail}", "{head}{shard:08d}{tail}"]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SHARD_TABLE_SCHEMA, compression="zstd") as writer:
        step = _TABLE_GROUP_LINES // 2
        for first in range(0, spec.shards, step):
            shards = range(first, min(first + step, spec.shards))
            # Lines are sorted by shard and then by path: "checksums/" comes before "tokens/".
            paths = [
                forms[kind].format(head=parts[kind][0], shard=shard, tail=parts[kind][2])
                for shard in shards
                for kind in (1, 0)
            ]
            columns = {
                "shard": np.repeat(np.array(shards, np.int32), 2),
                "path": paths,
                "bytes": [lengths[1], lengths[0]] * len(shards),
                "crc32c": [checksums[1], checksums[0]] * len(shards),
            }
            writer.write_table(pa.table(columns, schema=SHARD_TABLE_SCHEMA))
    data = sink.getvalue().to_pybytes()
    path = layout.shard_table(crc32c(data))
    write_bytes_atomic(path, data)
    return FileEntry(layout.relative(path), len(data), crc32c(data))


def _plan(root: str) -> dict[str, Any]:
    """Plan a build, and read the plan in the same way as a resumed build.

    The plan has as many shards as the index, with one input per shard.
    """
    folder = Path(root).with_suffix(".plan")
    folder.mkdir()
    image, image_list = folder / "image.jpg", folder / "images.csv"
    image.touch()
    image_list.write_text("path\n" + f"{image}\n" * Manifest.load(root).spec.shards)
    config = BuildConfig(
        (str(image_list),), folder / "index", folder, shard_size=1, dedupe=False, device="cpu", threads=1
    )
    inputs = freeze_inputs(config, lambda event: None, lambda: False)
    BuildPlan(
        root=config.out,
        spec=IndexSpec(inputs.rows, config.shard_size, _BLOCK_SHAPE, _BLOCK_SHAPE[1], config.precisions),
        model={"fingerprint": "synthetic"},
        settings=BuildSettings.choose(config),
        inputs_digest=inputs.digest,
        duplicates=inputs.duplicates,
        ignored=inputs.ignored,
        input_checksums=inputs.checksums,
    ).write()
    stored = read_plan(config.out)
    assert stored is not None
    check_frozen_inputs(stored, ())
    shutil.rmtree(folder)
    return {"shards": len(stored.shards)}


def _open(root: str) -> dict[str, Any]:
    with TokenStore.open(root, _PRECISION) as store:
        return {"rows": len(store)}


def _fetch(root: str) -> dict[str, Any]:
    with TokenStore.open(root, _PRECISION) as store:
        blocks = store.fetch(fetched_rows(len(store)))
        assert not blocks.astype(np.float32).any()
        return {"blocks": len(blocks)}


def _append(root: str) -> dict[str, Any]:
    """Append a shard of random blocks, with the same functions as the command `append`."""
    index = CommittedIndex.open(root)
    layout, manifest = Layout(index.root), index.manifest
    segment = Segment(manifest.spec.shards * _SHARD_SIZE, _SHARD_SIZE)
    spec = replace(manifest.spec, rows=segment.stop, segments=(*manifest.spec.used_segments, segment))
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((_SHARD_SIZE, spec.embed_dim), dtype=np.float32)
    with ShardWriter(index.root, spec, spec.shards - 1) as writer:
        for first in range(0, _SHARD_SIZE, 128):
            tokens = rng.standard_normal((128, *_BLOCK_SHAPE), dtype=np.float32).astype(BF16)
            writer.put(np.arange(first, first + 128), tokens, embeddings[first : first + 128])
        entries = [RowEntry(row, f"synthetic:{row}") for row in spec.shard_rows(spec.shards - 1)]
        receipt = writer.commit(rows_table(entries), "append", {})
    table = write_shard_table(layout, [(receipt.shard, file) for file in receipt.files])
    counts = add_counts(manifest.counts, Counts(_SHARD_SIZE, _SHARD_SIZE, 0))
    changed = replace(manifest, spec=spec, counts=counts, further_tables=(*manifest.further_tables, table))
    return {"snapshot": commit_snapshot(index, changed, {"kind": "append"}).snapshot.number}


def _delete(root: str) -> dict[str, Any]:
    index = CommittedIndex.open(root)
    row_ids = np.random.default_rng(1).choice(index.manifest.spec.used_segments[0].rows, _DELETED)
    changed = commit_deletion(index, plan_deletion(index, row_ids))
    return {"deleted": changed.snapshot.deleted_rows}


STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "plan": _plan,
    "open": _open,
    "fetch": _fetch,
    "append": _append,
    "delete": _delete,
}

if __name__ == "__main__":
    answer_step(STEPS, lambda: None)
