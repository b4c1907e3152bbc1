"""Reading the pooled embeddings: a shard at a time, or single rows (SPEC.md section 7)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.layout import IndexSpec, Layout

_SPARSE = 16  # below a row of so many, rows are read one by one


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


def read_embeddings(root: str | Path, spec: IndexSpec, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """float32 [len(rows), embed_dim] of `rows` in any order, repeated ones too; rows of holes are NaN.

    Of a shard of which few rows are asked for, only those are read. Works on an index that is being built.

    Raises:
        UsageError: a row that the index does not have.
        CorruptIndexError: a file that is missing, or does not hold what is read of it.
    """
    layout = Layout(Path(root))
    distinct, which = np.unique(rows, return_inverse=True)
    if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < spec.rows:
        raise UsageError(f"rows {distinct[0]} to {distinct[-1]} are asked for, the index has 0 to {spec.rows - 1}")
    parts = [np.empty((0, spec.embed_dim), dtype=np.float32)]
    shards, starts = np.unique(distinct // spec.shard_size, return_index=True)
    for shard, wanted in zip(shards.tolist(), np.split(distinct, starts[1:]), strict=False):
        places = wanted - spec.shard_rows(shard).start
        if len(places) * _SPARSE < len(spec.shard_rows(shard)):
            parts.append(_read_few(layout, spec, shard, places))
        else:
            parts.append(read_shard_embeddings(layout, spec, shard)[places])
    return np.concatenate(parts)[which]


def _read_few(layout: Layout, spec: IndexSpec, shard: int, places: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows at ascending `places` of a shard. All are announced before the first is read: a cold disk serves them at
    once."""
    path, size = layout.embedding_shard(shard), 4 * spec.embed_dim
    try:
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                for place in places.tolist():
                    os.posix_fadvise(file.fileno(), place * size, size, os.POSIX_FADV_WILLNEED)
            parts = [os.pread(file.fileno(), size, place * size) for place in places.tolist()]
    except OSError as error:
        raise CorruptIndexError(f"cannot read embeddings of shard {shard} ({path}): {error}") from error
    if any(len(part) != size for part in parts):
        raise CorruptIndexError(f"{path} is shorter than {spec.shard_size} x {spec.embed_dim} numbers")
    return np.frombuffer(b"".join(parts), dtype="<f4").reshape(len(places), spec.embed_dim)
