"""Writes indexes of random blocks, without images and without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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

DrawEmbeddings = Callable[[int, int], NDArray[np.float32]]
"""Takes a number of rows and a seed. Returns one unit vector per row."""


def make_synthetic(
    out: Path,
    spec: IndexSpec,
    seed: int = 0,
    *,
    embeddings: DrawEmbeddings | None = None,
    on_progress: OnProgress | None = None,
    uri_prefix: str = "synthetic:",
) -> Manifest:
    """Write a finished index of random tokens. Equal `spec` and `seed` give equal tokens.

    The index cannot be searched, because it has no model and no nearest-neighbour index.

    Args:
        out: missing or empty directory.
        spec: shape of the index.
        seed: seed of the random numbers.
        embeddings: function that draws the embeddings of a shard; None draws them uniformly from the unit sphere.
        on_progress: called after each shard.
        uri_prefix: text before the row id in the uri of each row.

    Raises:
        UsageError: `out` is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty; choose a new directory")
    begin_index(out, spec)
    plan = hashlib.sha256(f"synthetic {spec} {seed}".encode()).hexdigest()
    receipts = []
    for shard in range(spec.shards):
        receipts.append(_write_shard(out, spec, shard, seed, plan, embeddings, uri_prefix))
        if on_progress:
            on_progress("writing shards", shard + 1, spec.shards)
    provenance = Provenance({"fingerprint": "synthetic"}, {"seed": seed}, plan)
    return finish_index(out, spec, receipts, provenance, {"kind": "none"})


def _write_shard(
    out: Path, spec: IndexSpec, shard: int, seed: int, plan: str, embeddings: DrawEmbeddings | None, uri_prefix: str
) -> ShardReceipt:
    rng = np.random.default_rng([seed, shard])
    rows = spec.shard_rows(shard)
    drawn = None if embeddings is None else embeddings(len(rows), shard)
    with ShardWriter(out, spec, shard) as writer:
        for start in range(0, len(rows), _BATCH):
            count = min(_BATCH, len(rows) - start)
            tokens = rng.standard_normal((count, *spec.block_shape), dtype=np.float32).astype(BF16)
            vectors = _unit_vectors(rng, count, spec.embed_dim) if drawn is None else drawn[start : start + count]
            writer.put(np.arange(start, start + count), tokens, vectors)
        table = rows_table([RowEntry(row, f"{uri_prefix}{row}") for row in rows])
        return writer.commit(table, plan, {})


def _unit_vectors(rng: np.random.Generator, count: int, width: int) -> NDArray[np.float32]:
    vectors = rng.standard_normal((count, width), dtype=np.float32)
    unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit
