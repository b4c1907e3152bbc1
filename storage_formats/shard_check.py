"""Checks all files of one shard, for `verify_index`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Codec, codec, fill_record
from storage_formats.errors import CorruptIndexError, MachineError, cannot_read
from storage_formats.format.checksum import crc32c_rows, crc32c_stream, read_checksums
from storage_formats.format.index_files import open_index_file
from storage_formats.format.layout import Layout, padded_shard_bytes
from storage_formats.format.manifest import Counts, Manifest
from storage_formats.format.rows import DUPLICATE, INDEXED, failures_by_reason, read_shard_rows
from storage_formats.format.shard_table import FileEntry
from storage_formats.reading.embeddings import read_shard_embeddings
from storage_formats.writing.token_shard import shard_index_bytes

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Problem:
    """A problem that `verify_index` found.

    Attributes:
        path: path of the file with the problem, relative to the index.
        code: kind of problem, for use in programs, for example `missing-file`.
        message: description of the problem, to print after the path, for example "cannot be read: ...".

    Example:
        >>> from pathlib import Path
        >>> from storage_formats import verify_index
        >>> Path("photos.edje/rows/00000000.parquet").unlink()
        >>> [(problem.path, problem.code) for problem in verify_index("photos.edje")]
        [('rows/00000000.parquet', 'missing-file')]
    """

    path: str
    code: str
    message: str


def check_file(root: Path, entry: FileEntry, *, only_length: bool = False) -> Problem | None:
    """Compare the length and the CRC-32C of a file of the index at `root` with its entry.

    Raises:
        MachineError: the machine is in trouble, for example out of file descriptors, so the file may be sound.
    """
    try:
        with open_index_file(root, root / entry.path) as file:
            length = os.fstat(file.fileno()).st_size
            if length != entry.bytes:
                message = f"has {length} bytes instead of the {entry.bytes} that were committed"
                return Problem(entry.path, "length", message)
            crc = entry.crc32c if only_length else crc32c_stream(file)
    except OSError as error:
        failure = cannot_read(entry.path, error)
        if isinstance(failure, MachineError) and error.errno != errno.EIO:  # EIO: this part of the device is damaged
            raise failure from error
        return Problem(entry.path, "missing-file", f"cannot be read: {error.strerror}")
    if crc != entry.crc32c:
        return Problem(entry.path, "checksum", f"has CRC-32C {crc:08x} instead of {entry.crc32c:08x}")
    return None


@dataclass(frozen=True)
class CheckedShard:
    """The result of the check of one shard.

    Attributes:
        shard: shard number.
        problems: problems of its files.
        counts: numbers of indexed, duplicate and failed inputs; all 0 if the rows table cannot be read.
        values: number of values of each source column; empty if the rows table cannot be read.
    """

    shard: int
    problems: list[Problem]
    counts: Counts
    values: Mapping[str, int]


class ShardCheck:
    """Checks the files of one shard.

    Attributes:
        files: entries of the files that the check reads, by relative path.
    """

    def __init__(self, layout: Layout, manifest: Manifest, shard: int, files: Mapping[str, FileEntry]) -> None:
        self._layout = layout
        self._columns = manifest.columns
        self._spec = spec = manifest.spec
        self._shard = shard
        self._rows = spec.shard_rows(shard)
        self._expected = [layout.embedding_shard(shard), layout.rows_file(shard)]
        for name in spec.precisions:
            self._expected += [self._token_path(name), layout.checksums(name, shard)]
        expected_paths = set(map(layout.relative, self._expected))
        self.files = {path: entry for path, entry in files.items() if path in expected_paths}
        self._unexpected = sorted(files.keys() - expected_paths)
        self._counts = Counts(0, 0, 0)
        self._values: dict[str, int] = {}

    def run(self) -> CheckedShard:
        problems = [problem for path in self._expected for problem in self._check_file(path)]
        for path in self._unexpected:
            problems.append(Problem(path, "shard-table", "is in the shard table, but does not belong to this index"))
        damaged_paths = {problem.path for problem in problems}
        indexed = None
        if self._layout.relative(self._layout.rows_file(self._shard)) not in damaged_paths:
            try:
                indexed = self._check_rows(problems)
            except CorruptIndexError as error:
                message = f"cannot be read: {error.__cause__}" if error.__cause__ else str(error)
                problems.append(self._problem(self._layout.rows_file(self._shard), "rows", message))
        for name in self._spec.precisions:
            problems += self._check_tokens(name, indexed)
        if indexed is not None:
            problems += self._check_embeddings(indexed)
        return CheckedShard(self._shard, problems, self._counts, self._values)

    def _token_path(self, name: str) -> Path:
        return self._layout.token_shard(name, self._shard, len(codec(name, self._spec.block_shape).record_shape))

    def _problem(self, path: Path, code: str, message: str) -> Problem:
        return Problem(self._layout.relative(path), code, message)

    def _check_file(self, path: Path) -> Iterator[Problem]:
        entry = self.files.get(self._layout.relative(path))
        if entry is None:
            yield self._problem(path, "shard-table", "is not listed in the shard table")
        elif problem := check_file(self._layout.root, entry):
            yield problem

    def _check_rows(self, problems: list[Problem]) -> NDArray[np.bool_]:
        table = read_shard_rows(self._layout, self._shard, source_columns=self._columns)
        path = self._layout.rows_file(self._shard)
        # The lengths are compared first, because a damaged table may have too many rows for a list.
        if len(table) != len(self._rows) or table["row_id"].to_pylist() != list(self._rows):
            raise CorruptIndexError(
                f"the rows table must contain every row id from {self._rows.start} to {self._rows.stop - 1} "
                "once, in ascending order"
            )
        self._values = {column.name: len(table) - table[column.name].null_count for column in self._columns}
        statuses = table["status"].to_pylist()
        self._counts = Counts(
            inputs=len(self._rows),
            indexed=statuses.count(INDEXED),
            duplicates=statuses.count(DUPLICATE),
            failed=failures_by_reason(table),
        )
        if problem := self._counts.problem():
            problems.append(self._problem(path, "counts", problem))
        return np.array([status == INDEXED for status in statuses])

    def _check_tokens(self, name: str, indexed: NDArray[np.bool_] | None) -> Iterator[Problem]:
        token_codec = codec(name, self._spec.block_shape)
        path, rows = self._token_path(name), len(self._rows)
        index_offset, length = padded_shard_bytes(rows, self._spec.shard_size, token_codec.record_bytes)
        try:
            checksums = read_checksums(self._layout, name, self._shard, rows)
            with open_index_file(self._layout.root, path) as file:
                if os.fstat(file.fileno()).st_size != length:
                    return  # reported by _check_file
                yield from self._check_blocks(file, token_codec, checksums, indexed)
                file.seek(index_offset)
                index = file.read()
        except (OSError, CorruptIndexError):
            return  # reported by _check_file
        if indexed is None:
            return
        present = np.zeros(self._spec.shard_size, dtype=np.bool_)
        present[:rows] = indexed
        if index != shard_index_bytes(present, token_codec.record_bytes):
            yield self._problem(path, "shard-index", "has a shard index that does not match the rows table")

    def _check_blocks(
        self,
        file: BinaryIO,
        token_codec: Codec,
        checksums: NDArray[np.uint32],
        indexed: NDArray[np.bool_] | None,
    ) -> Iterator[Problem]:
        path, size = self._token_path(token_codec.name), token_codec.record_bytes
        step = max(1, _PIECE_BYTES // size)
        for first in range(0, len(self._rows), step):
            count = min(step, len(self._rows) - first)
            records = np.fromfile(file, dtype=np.uint8, count=count * size).reshape(count, size)
            for position in first + np.flatnonzero(crc32c_rows(records) != checksums[first : first + count]):
                row_id = self._rows.start + position
                yield self._problem(path, "block-checksum", f"has a damaged block for row {row_id}")
            present = np.ones(count, dtype=np.bool_) if indexed is None else indexed[first : first + count]
            for position in np.flatnonzero(~present):
                if not (records[position] == fill_record(token_codec)[0]).all():
                    row_id = self._rows.start + first + position
                    yield self._problem(path, "hole", f"has data for row {row_id}, which is a hole")

    def _check_embeddings(self, indexed: NDArray[np.bool_]) -> Iterator[Problem]:
        path = self._layout.embedding_shard(self._shard)
        try:
            values = read_shard_embeddings(self._layout, self._spec, self._shard)
        except CorruptIndexError:
            return  # reported by _check_file
        finite = np.asarray(np.isfinite(values).all(axis=1))
        for position in np.flatnonzero(finite != indexed):
            row_id = self._rows.start + position
            message = (
                f"has an embedding for row {row_id}, which is a hole"
                if finite[position]
                else f"has no embedding for row {row_id}, which is indexed"
            )
            yield self._problem(path, "embedding", message)
