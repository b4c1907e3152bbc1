"""Writes indexes of random blocks, without images and without a model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from edje_index.progress import OnProgress
from storage_formats.codecs import BF16
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import Manifest
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import RowEntry, rows_table
from storage_formats.writing.begin import begin_index
from storage_formats.writing.publish import Provenance, finish_index
from storage_formats.writing.shard_writer import ShardWriter

_BATCH = 128


def make_synthetic(out: Path, spec: IndexSpec, seed: int = 0, on_progress: OnProgress | None = None) -> Manifest:
    """Write a finished index of random tokens. Equal `spec` and `seed` give equal tokens.

    The index cannot be searched, because it has no model and no nearest-neighbour index.

    Raises:
        UsageError: `out` is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty; choose a new directory")
    begin_index(out, spec)
    plan = hashlib.sha256(f"synthetic {spec} {seed}".encode()).hexdigest()
    receipts = []
    for shard in range(spec.shards):
        receipts.append(_write_shard(out, spec, shard, seed, plan))
        if on_progress:
            on_progress("writing shards", shard + 1, spec.shards)
    provenance = Provenance({"fingerprint": "synthetic"}, {"seed": seed}, plan)
    return finish_index(out, spec, receipts, provenance, {"kind": "none"})


def _write_shard(out: Path, spec: IndexSpec, shard: int, seed: int, plan: str) -> ShardReceipt:
    rng = np.random.default_rng([seed, shard])
    rows = spec.shard_rows(shard)
    with ShardWriter(out, spec, shard) as writer:
        for start in range(0, len(rows), _BATCH):
            count = min(_BATCH, len(rows) - start)
            tokens = rng.standard_normal((count, *spec.block_shape), dtype=np.float32).astype(BF16)
            embeddings = rng.standard_normal((count, spec.embed_dim), dtype=np.float32)
            embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
            writer.put(np.arange(start, start + count), tokens, embeddings)
        table = rows_table([RowEntry(row, f"synthetic:{row}") for row in rows])
        return writer.commit(table, plan, {})
