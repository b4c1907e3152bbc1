"""Writes indexes of random blocks, without images and without a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from storage_formats.codecs import BF16
from storage_formats.format.layout import IndexSpec
from storage_formats.writing.index_writer import IndexWriter

_BATCH = 128


def make_synthetic(out: Path, spec: IndexSpec) -> None:
    """Write a finished index of random tokens to the missing or empty directory `out`.
    Equal values of `spec` give equal tokens.

    The index cannot be searched, because it has no model and no nearest-neighbour
    index.
    """
    rng = np.random.default_rng(0)
    with IndexWriter.create(
        out,
        block_shape=spec.block_shape,
        embed_dim=spec.embed_dim,
        precisions=spec.precisions,
        shard_size=spec.shard_size,
        encoder="synthetic",
    ) as writer:
        for start in range(0, spec.rows, _BATCH):
            count = min(_BATCH, spec.rows - start)
            tokens = rng.standard_normal(
                (count, *spec.block_shape), dtype=np.float32
            ).astype(BF16)
            writer.append(
                tokens, rng.standard_normal((count, spec.embed_dim), dtype=np.float32)
            )
