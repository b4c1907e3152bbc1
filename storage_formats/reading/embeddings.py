"""Reads embeddings (SPEC.md section 7).

A single embedding has no checksum. Before `read_embeddings` reads from an embedding
file for the first time, it therefore compares the checksum of the whole file with the
shard table. If the index is on a file system and its embeddings exceed 1 GiB, a read of
less than 1/16 of the rows of a file skips this check.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_formats.arrays import holes
from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.file_check import (
    FileEntry,
    compare_open,
    refuse,
)
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import (
    EMBEDDING_FILE,
    PAGE_BYTES,
    IndexSpec,
    Layout,
)
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import RowIds, check_row_ids, check_rows_in_use
from storage_formats.reading.batch import Batch
from storage_formats.reading.files import ShardFiles, iter_ranges

# A read counts as small if it needs less than 1 / `_SPARSE` of the rows of a file.
_SPARSE = 16
# number of embeddings that are read at once, with memory for gaps between them
_PIECE_ROWS = 4096
# If the embeddings of an index exceed this size in bytes, small reads skip the check of
# the whole file, because the check would take much longer than the read.
_COMPARED_BYTES = 1 << 30


def read_shard_embeddings(
    layout: Layout, spec: IndexSpec, shard: int
) -> NDArray[np.float32]:
    """Read the embeddings of a shard, float32 [rows, embed_dim]. The embedding of a
    hole is NaN. The file is not compared with its checksum.
    """
    path = layout.embedding_shard(shard)
    try:
        length = 4 * spec.shard_size * spec.embed_dim
        data = read_index_file(layout.root, path, max_bytes=length)
    except OSError as error:
        raise cannot_read(path, error) from error
    _check_length(str(path), len(data), spec)
    rows = len(spec.shard_rows(shard))
    return np.frombuffer(data, "<f4", rows * spec.embed_dim).reshape(rows, -1)


def _check_length(path: str, length: int, spec: IndexSpec) -> None:
    if length != (expected := 4 * spec.shard_size * spec.embed_dim):
        raise CorruptIndexError(
            f"the embedding file {path} has {length} bytes instead of {expected}",
            remedy="verify",
        )


@dataclass(frozen=True)
class IndexedEmbeddings:
    """The stored embeddings of an index, or of an unfinished build.

    Files on a file system stay open and are not compared with checksums. For an index
    at a URL, `index` must be given: `read_embeddings` then downloads the files and
    compares their checksums.

    `embeddings[row_ids]` returns float32 [k, embed_dim], see `read_embeddings`.
    Iteration yields, for each of `shards`, the rows that are not holes as a pair (row
    ids int64 [k], embeddings float32 [k, embed_dim]).
    """

    layout: Layout
    spec: IndexSpec
    shards: Sequence[int] = ()
    index: CommittedIndex | None = None

    @functools.cached_property
    def _files(self) -> ShardFiles:
        return ShardFiles(self.layout.root, EMBEDDING_FILE)

    def __getitem__(self, row_ids: RowIds) -> NDArray[np.float32]:
        if self.index is not None and self.index.remote is not None:
            return read_embeddings(self.index, row_ids)
        ids = check_row_ids(row_ids, self.spec.rows)
        return _read_rows(self._files, self.spec, ids, {})

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for shard in self.shards:
            embeddings = read_shard_embeddings(self.layout, self.spec, shard)
            positions = np.flatnonzero(~holes(embeddings))
            yield positions + shard * self.spec.shard_size, embeddings[positions]


def read_embeddings(
    index: CommittedIndex, row_ids: RowIds, *, compares_all: bool = False
) -> NDArray[np.float32]:
    """Read the embeddings of `row_ids`, in the order of `row_ids`, float32 [k,
    embed_dim]. The embedding of a hole is NaN.

    Args:
        row_ids: [k], row ids in any order. Duplicates are allowed.
        compares_all: True compares each file with its checksum, also if the index is
            large, and if this process has compared the file before.
    """
    spec = index.manifest.spec
    ids = check_row_ids(row_ids, spec.rows)
    check_rows_in_use(ids, spec)
    shards, counts = np.unique(ids // spec.shard_size, return_counts=True)
    is_large = 4 * spec.used_rows * spec.embed_dim > _COMPARED_BYTES
    if is_large and index.remote is None and not compares_all:
        shards = shards[counts * _SPARSE >= spec.shard_size]
    committed = CommittedFiles(index, EMBEDDING_FILE).files(shards.tolist())
    index.fetch(committed.values())
    files = ShardFiles(index.root, EMBEDDING_FILE)
    try:
        return _read_rows(files, spec, ids, committed, only_first_use=not compares_all)
    finally:
        files.close()


def _read_rows(
    files: ShardFiles,
    spec: IndexSpec,
    row_ids: NDArray[np.int64],
    committed: dict[int, FileEntry],
    *,
    only_first_use: bool = True,
) -> NDArray[np.float32]:
    """Read the embeddings of `row_ids`, float32 [k, embed_dim].

    The files of shards in `committed` must match their file entries, see
    `compare_open`.
    """
    size = 4 * spec.embed_dim
    distinct, inverse = np.unique(row_ids, return_inverse=True)
    batch = Batch(*np.divmod(distinct, spec.shard_size), distinct)
    embeddings = np.empty((len(distinct), spec.embed_dim), dtype="<f4")
    for piece in batch.pieces(_PIECE_ROWS):
        part = batch[piece]
        ranges, sources, buffer = part.ranges(size, gap=PAGE_BYTES // size)
        indices = (sources - buffer.ctypes.data) // size
        held = files.acquire([shard for shard, _, _ in part.shard_spans])
        try:
            for shard, file in held.items():
                _check_length(file.path, file.size, spec)
                if entry := committed.get(shard):
                    problem = compare_open(
                        file.fd, entry, only_first_use=only_first_use
                    )
                    refuse(file.path, problem, spec.shard_rows(shard))
            requests = [
                (held[shard], offset, target) for shard, offset, target in ranges
            ]
            for _ in iter_ranges(requests):
                pass
        finally:
            files.release(held)
        values = buffer.view("<f4").reshape(-1, spec.embed_dim)
        embeddings[piece] = values[indices]
    return embeddings[inverse]
