"""Reading the pooled embeddings, a shard at a time (SPEC.md section 7)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError
from storage_formats.layout import IndexSpec, Layout


def read_shard_embeddings(layout: Layout, spec: IndexSpec, shard: int) -> NDArray[np.float32]:
    """float32 [rows of the shard, embed_dim]; rows of holes are NaN. CorruptIndexError where the file is not whole."""
    path = layout.embedding_shard(shard)
    try:
        values = np.fromfile(path, dtype="<f4")
    except OSError as error:
        raise CorruptIndexError(f"cannot read embeddings of shard {shard} ({path}): {error}") from error
    if values.size != spec.shard_size * spec.embed_dim:
        raise CorruptIndexError(f"{path} holds {values.size} numbers, not {spec.shard_size} x {spec.embed_dim}")
    return values.reshape(spec.shard_size, spec.embed_dim)[: len(spec.shard_rows(shard))]


def iter_embeddings(root: str | Path, spec: IndexSpec) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(first row id, float32 [k, embed_dim]) of each shard in order. Works on an index that is being built."""
    layout = Layout(Path(root))
    for shard in range(spec.shards):
        yield spec.shard_rows(shard).start, read_shard_embeddings(layout, spec, shard)
