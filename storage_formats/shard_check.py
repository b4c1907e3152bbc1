"""Checks all files of one shard, for `verify_index`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from storage_formats.arrays import Bools
from storage_formats.codecs import Codec, codec, fill_record
from storage_formats.errors import CorruptIndexError
from storage_formats.format.checksum import crc32c_rows, read_checksums
from storage_formats.format.file_check import FileEntry, Problem, check_file
from storage_formats.format.index_files import IndexFile
from storage_formats.format.layout import IndexSpec, Layout, padded_shard_bytes
from storage_formats.format.manifest import Counts, Manifest
from storage_formats.format.rows import DUPLICATE, INDEXED, failures_by_reason
from storage_formats.format.zarr_metadata import shard_index_bytes
from storage_formats.reading.embeddings import read_shard_embeddings

_PIECE_BYTES = 8 << 20


def shard_paths(layout: Layout, spec: IndexSpec, shard: int) -> list[str]:
    """Return the paths of the files of a shard, relative to the index."""
    paths = [layout.embedding_shard(shard)]
    for name in spec.precisions:
        ndim = len(codec(name, spec.block_shape).record_shape)
        paths += [layout.token_shard(name, shard, ndim), layout.checksums(name, shard)]
    return [layout.relative(path) for path in paths]


def check_shard(
    layout: Layout,
    manifest: Manifest,
    shard: int,
    files: Mapping[str, FileEntry],
    rows: pa.Table | None,
) -> tuple[list[Problem], Counts]:
    """Check all files of a shard.

    Args:
        files: entries of the shard in the shard table, keyed by path.
        rows: the columns `status` and `reason` of the rows of the shard; None if they
            cannot be read.

    Returns:
        The problems, and the counts of the inputs of the shard. Without `rows`, all
        counts are 0.
    """
    spec = manifest.spec
    expected = shard_paths(layout, spec, shard)
    problems = list[Problem]()
    for path in expected:
        if path not in files:
            problems.append(
                Problem(path, "shard-table", "is not listed in the shard table")
            )
        elif problem := check_file(layout.root, files[path]):
            problems.append(problem)
    for path in sorted(files.keys() - set(expected)):
        problems.append(
            Problem(
                path,
                "shard-table",
                "is in the shard table, but does not belong to this index",
            )
        )

    counts = Counts(0, 0, 0)
    indexed = None
    if rows is not None:
        statuses = rows["status"].to_pylist()
        counts = Counts(
            len(rows),
            statuses.count(INDEXED),
            statuses.count(DUPLICATE),
            failures_by_reason(rows),
        )
        indexed = np.array([status == INDEXED for status in statuses])
        if problem_of_counts := counts.problem():
            where = f"shard {shard} of the rows"
            problems.append(Problem(where, "counts", problem_of_counts))
    for name in spec.precisions:
        problems += _check_tokens(
            layout, spec, shard, codec(name, spec.block_shape), indexed
        )
    if indexed is not None:
        problems += _check_embeddings(layout, spec, shard, indexed)
    return problems, counts


def _check_tokens(
    layout: Layout,
    spec: IndexSpec,
    shard: int,
    token_codec: Codec,
    indexed: Bools | None,
) -> Iterator[Problem]:
    """Check each record of a token file against its CRC-32C, and the holes and the
    shard index against the rows table.

    Args:
        indexed: bool [rows], which rows of the shard are indexed. None if the rows
            table cannot be read; then holes and the shard index are not checked.
    """
    path = layout.token_shard(token_codec.name, shard, len(token_codec.record_shape))
    rows = spec.shard_rows(shard)
    where = layout.relative(path)
    size = token_codec.record_bytes
    index_offset, length = padded_shard_bytes(len(rows), spec.shard_size, size)
    try:
        checksums = read_checksums(layout, token_codec.name, shard, len(rows))
        with IndexFile(layout.root, path) as file:
            if os.fstat(file.fileno()).st_size != length:
                # `check_file` reports the wrong length.
                return
            step = max(1, _PIECE_BYTES // size)
            for first in range(0, len(rows), step):
                count = min(step, len(rows) - first)
                records = np.fromfile(file, dtype=np.uint8, count=count * size).reshape(
                    count, size
                )
                for position in first + np.flatnonzero(
                    crc32c_rows(records) != checksums[first : first + count]
                ):
                    message = f"has a damaged block for row {rows.start + position}"
                    yield Problem(where, "block-checksum", message)
                # Without the rows table, no position is known to be a hole.
                is_indexed = (
                    np.ones(count, np.bool_)
                    if indexed is None
                    else indexed[first : first + count]
                )
                for position in np.flatnonzero(~is_indexed):
                    if not (records[position] == fill_record(token_codec)[0]).all():
                        message = (
                            f"has data for row {rows.start + first + position}, which"
                            " is a hole"
                        )
                        yield Problem(where, "hole", message)
            file.seek(index_offset)
            index = file.read()
    except (OSError, CorruptIndexError):
        # `check_file` reports files that cannot be read.
        return
    if indexed is None:
        return
    present = np.zeros(spec.shard_size, dtype=np.bool_)
    present[: len(rows)] = indexed
    if index != shard_index_bytes(present, size):
        yield Problem(
            where, "shard-index", "has a shard index that does not match the rows table"
        )


def _check_embeddings(
    layout: Layout, spec: IndexSpec, shard: int, indexed: Bools
) -> Iterator[Problem]:
    """Check that the rows `indexed`, bool [rows], have embeddings, and that all other
    rows have none.
    """
    where = layout.relative(layout.embedding_shard(shard))
    try:
        values = read_shard_embeddings(layout, spec, shard)
    except CorruptIndexError:
        # `check_file` reports the damaged file.
        return
    finite = np.asarray(np.isfinite(values).all(axis=1))
    for position in np.flatnonzero(finite != indexed):
        row_id = spec.shard_rows(shard).start + position
        if finite[position]:
            yield Problem(
                where,
                "embedding",
                f"has an embedding for row {row_id}, which is a hole",
            )
        else:
            yield Problem(
                where,
                "embedding",
                f"has no embedding for row {row_id}, which is indexed",
            )
