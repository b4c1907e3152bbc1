"""Reading embeddings, one shard at a time or single rows (SPEC.md section 7)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError
from storage_formats.format.index_files import open_index_file
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.row_ids import RowIds, check_row_ids

_SPARSE = 16  # read single rows if fewer than one row in 16 of a full shard is requested


def read_shard_embeddings(layout: Layout, spec: IndexSpec, shard: int) -> NDArray[np.float32]:
    """Read the embeddings of a shard, float32 [rows of the shard, embed_dim]; NaN for holes.

    Raises:
        CorruptIndexError: the embedding file is missing or has the wrong length.
    """
    with _open_shard(layout, spec, shard) as file:
        values = np.fromfile(file, dtype="<f4", count=len(spec.shard_rows(shard)) * spec.embed_dim)
    return values.reshape(-1, spec.embed_dim)


@contextmanager
def _open_shard(layout: Layout, spec: IndexSpec, shard: int) -> Iterator[BinaryIO]:
    """Open the embedding file of a shard. An OSError inside the `with` block becomes a CorruptIndexError."""
    path, length = layout.embedding_shard(shard), 4 * spec.shard_size * spec.embed_dim
    try:
        with open_index_file(layout.root, path) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != length:
                raise CorruptIndexError(
                    f"the embedding file {path} has {actual} bytes instead of {length}; run 'edje-index verify'"
                )
            yield file
    except OSError as error:
        raise CorruptIndexError(
            f"cannot read the embeddings of shard {shard} in {path}: {error.strerror}; run 'edje-index verify'"
        ) from error


@dataclass(frozen=True)
class IndexedEmbeddings:
    """Iterates over the embeddings of the indexed rows of `shards`, shard by shard.

    Yields (row ids int64 [k], embeddings float32 [k, embed_dim]) for each shard. Can be iterated over several times.
    Also works during a build.
    """

    layout: Layout
    spec: IndexSpec
    shards: Sequence[int]

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for shard in self.shards:
            embeddings = read_shard_embeddings(self.layout, self.spec, shard)
            positions = np.flatnonzero(~np.isnan(embeddings[:, 0]))
            yield positions + shard * self.spec.shard_size, embeddings[positions]


def read_embeddings(root: str | Path, spec: IndexSpec, row_ids: RowIds) -> NDArray[np.float32]:
    """Read the embeddings of `row_ids` in this order, float32 [k, embed_dim]; NaN for holes. Also works during a build.

    Args:
        root: directory of the index.
        spec: shape of the index.
        row_ids: [k], in any order; duplicates are allowed.

    Raises:
        RowIdError: a row id is out of range.
        CorruptIndexError: a file is missing or has the wrong length.
    """
    layout = Layout(Path(root))
    distinct_ids, inverse = np.unique(check_row_ids(row_ids, spec.rows), return_inverse=True)
    parts = [np.empty((0, spec.embed_dim), dtype=np.float32)]
    shards, starts = np.unique(distinct_ids // spec.shard_size, return_index=True)
    for shard, shard_ids in zip(shards.tolist(), np.split(distinct_ids, starts[1:]), strict=False):
        positions = shard_ids % spec.shard_size
        if len(positions) * _SPARSE < spec.shard_size:
            parts.append(_read_single_rows(layout, spec, shard, positions))
        else:
            parts.append(read_shard_embeddings(layout, spec, shard)[positions])
    return np.concatenate(parts)[inverse]


def _read_single_rows(layout: Layout, spec: IndexSpec, shard: int, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    size = 4 * spec.embed_dim
    with _open_shard(layout, spec, shard) as file:
        if hasattr(os, "posix_fadvise"):
            for position in positions.tolist():
                os.posix_fadvise(file.fileno(), position * size, size, os.POSIX_FADV_WILLNEED)
        parts = [os.pread(file.fileno(), size, position * size) for position in positions.tolist()]
    return np.frombuffer(b"".join(parts), dtype="<f4").reshape(len(positions), spec.embed_dim)
