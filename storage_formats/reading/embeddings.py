"""Reading of embeddings (SPEC.md section 7).

A single embedding has no checksum. The first read from an embedding file therefore
compares the checksum of the whole file with the shard table. If the embeddings of the
index exceed 1 GiB, reads of a few rows of a file skip this check.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.checksum import crc32c_stream
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.index_files import open_index_file
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.shard_table import EXCHANGED, FileEntry
from storage_formats.format.tombstones import RowIds, check_row_ids, check_rows_in_use
from storage_formats.system_calls import advise

# read single rows if fewer than one row in 16 of a full shard is requested
_SPARSE = 16
# in an index with more embeddings, checks of whole files would slow down small reads
_COMPARED_BYTES = 1 << 30
_KEPT_COMPARISONS = 100_000

_compared: set[tuple[object, ...]] = set()
"""Files that this process has compared with the shard table, and their file entries."""


def read_shard_embeddings(
    layout: Layout,
    spec: IndexSpec,
    shard: int,
    committed: FileEntry | None = None,
    positions: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """Read the embeddings of a shard, float32 [k, embed_dim]. The embedding of a hole
    is NaN.

    Args:
        committed: file entry in the shard table, which the file must match. None skips
            this check.
        positions: [k], positions of the rows to read one by one. None reads all rows of
            the shard at once.
    """
    path = layout.embedding_shard(shard)
    size = 4 * spec.embed_dim
    try:
        with open_index_file(layout.root, path) as file:
            status = os.fstat(file.fileno())
            if status.st_size != spec.shard_size * size:
                raise CorruptIndexError(
                    f"the embedding file {path} has {status.st_size} bytes instead of"
                    f" {spec.shard_size * size}",
                    remedy="verify",
                )
            if committed is not None:
                # A file that has not changed since the last comparison is not compared
                # again.
                comparison = (
                    committed,
                    status.st_dev,
                    status.st_ino,
                    status.st_size,
                    status.st_mtime_ns,
                )
                if comparison not in _compared:
                    if (status.st_size, crc32c_stream(file)) != (
                        committed.bytes,
                        committed.crc32c,
                    ):
                        raise CorruptIndexError(
                            f"{path} is not the file that was committed: {EXCHANGED}",
                            row_ids=tuple(spec.shard_rows(shard)),
                        )
                    if len(_compared) >= _KEPT_COMPARISONS:
                        _compared.clear()
                    _compared.add(comparison)
            if positions is None:
                file.seek(0)
                return np.fromfile(
                    file,
                    dtype="<f4",
                    count=len(spec.shard_rows(shard)) * spec.embed_dim,
                ).reshape(-1, spec.embed_dim)
            if committed is None:
                for position in positions.tolist():
                    advise(file.fileno(), position * size, size)
            parts = [
                os.pread(file.fileno(), size, position * size)
                for position in positions.tolist()
            ]
    except OSError as error:
        raise cannot_read(path, error) from error
    return np.frombuffer(b"".join(parts), dtype="<f4").reshape(
        len(positions), spec.embed_dim
    )


@dataclass(frozen=True)
class IndexedEmbeddings:
    """The stored embeddings of an index, or of an unfinished build. Files are not
    compared with checksums.

    For an index at a URL, `index` must be given: the files are downloaded.

    `embeddings[row_ids]` returns float32 [k, embed_dim], see `read_embeddings`.
    Iteration yields the indexed rows of each of `shards` as a pair (row ids int64 [k],
    embeddings float32 [k, embed_dim]).
    """

    layout: Layout
    spec: IndexSpec
    shards: Sequence[int] = ()
    index: CommittedIndex | None = None

    def __getitem__(self, row_ids: RowIds) -> NDArray[np.float32]:
        if self.index is not None and self.index.remote is not None:
            return read_embeddings(self.index, row_ids)
        return _read_rows(
            self.layout, self.spec, check_row_ids(row_ids, self.spec.rows), {}
        )

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for shard in self.shards:
            embeddings = read_shard_embeddings(self.layout, self.spec, shard)
            positions = np.flatnonzero(~np.isnan(embeddings[:, 0]))
            yield positions + shard * self.spec.shard_size, embeddings[positions]


def read_embeddings(index: CommittedIndex, row_ids: RowIds) -> NDArray[np.float32]:
    """Read the embeddings of `row_ids` in this order, float32 [k, embed_dim]. The
    embedding of a hole is NaN.

    Args:
        row_ids: [k], row ids in any order. Duplicates are allowed.
    """
    layout = Layout(index.root)
    spec = index.manifest.spec
    ids = check_row_ids(row_ids, spec.rows)
    check_rows_in_use(ids, spec)
    shards, counts = np.unique(ids // spec.shard_size, return_counts=True)
    if index.remote is None and 4 * spec.used_rows * spec.embed_dim > _COMPARED_BYTES:
        shards = shards[counts * _SPARSE >= spec.shard_size]
    committed = CommittedFiles(index, layout.embedding_shard).files(shards.tolist())
    index.fetch(committed.values())
    return _read_rows(layout, spec, ids, committed)


def _read_rows(
    layout: Layout,
    spec: IndexSpec,
    row_ids: NDArray[np.int64],
    committed: dict[int, FileEntry],
) -> NDArray[np.float32]:
    """Read the embeddings of `row_ids`, float32 [k, embed_dim].

    The files of shards in `committed` must match their file entries.
    """
    distinct_ids, inverse = np.unique(row_ids, return_inverse=True)
    parts = [np.empty((0, spec.embed_dim), dtype=np.float32)]
    shards, starts = np.unique(distinct_ids // spec.shard_size, return_index=True)
    for shard, shard_ids in zip(
        shards.tolist(), np.split(distinct_ids, starts[1:]), strict=False
    ):
        positions = shard_ids % spec.shard_size
        entry = committed.get(shard)
        if len(positions) * _SPARSE < spec.shard_size:
            parts.append(read_shard_embeddings(layout, spec, shard, entry, positions))
        else:
            parts.append(read_shard_embeddings(layout, spec, shard, entry)[positions])
    return np.concatenate(parts)[inverse]
