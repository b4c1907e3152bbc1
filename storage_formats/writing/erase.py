"""Erasure of deleted rows: overwrites their data in all files of an index (SPEC.md section 12).

The caller must hold the lock of the index and must have removed all earlier snapshots. After `store_erasure`, the
caller may call `erase_rows` repeatedly until it succeeds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage_formats.atomic import fsync_path, fsync_paths, naming, write_bytes_atomic, write_json_atomic
from storage_formats.codecs import codec
from storage_formats.errors import CorruptIndexError
from storage_formats.format.checksum import crc32c, read_checksums
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import Layout, padded_shard_bytes
from storage_formats.format.manifest import CommittedIndex, Counts, Manifest
from storage_formats.format.parquet import read_table
from storage_formats.format.rows import DUPLICATE, ERASED, FAILED, INDEXED, iter_stored_rows, write_rows
from storage_formats.format.shard_table import FileEntry, read_shard_table, write_shard_table
from storage_formats.format.tombstones import rows_in_use
from storage_formats.writing.publish import remove_build
from storage_formats.writing.snapshots import remove_unnamed_files
from storage_formats.writing.token_shard import erased_record, freed_bytes, shard_index_bytes

_PIECE = bytes(1 << 20)
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Erasure:
    """The rows to erase, and the new values in `index.json`.

    Attributes:
        rows: row ids to erase, ascending. Empty if only earlier snapshots, which are removed, contain the data.
        counts: numbers of indexed, duplicate and failed inputs after the erasure.
        values: number of values of each source column after the erasure.
    """

    rows: tuple[int, ...]
    counts: Counts
    values: dict[str, int]


def plan_erasure(index: CommittedIndex, row_ids: Iterable[int]) -> Erasure:
    """Plan the erasure of the rows `row_ids`. Rows that are erased already are left out."""
    rows: list[int] = []
    counts, values = Counter[str](), Counter[str]()
    requested = set(row_ids)
    shards = sorted({row // index.manifest.spec.shard_size for row in requested})
    for table in iter_stored_rows(index, shards=shards) if shards else ():
        for line in table.to_pylist():
            if line["row_id"] in requested and line["reason"] != ERASED:
                rows.append(line["row_id"])
                counts[line["reason"] if line["status"] == FAILED else line["status"]] += 1
                values.update(column.name for column in index.manifest.columns if line[column.name] is not None)
    left = {column.name: column.values - values[column.name] for column in index.manifest.columns}
    return Erasure(tuple(rows), _counts_after(index.manifest.counts, counts), left)


def store_erasure(index: CommittedIndex, erasure: Erasure) -> None:
    """Write `erasure` to disk, so that an interrupted erasure can be resumed."""
    write_json_atomic(Layout(index.root).erasure, asdict(erasure))


def _counts_after(before: Counts, erased: Counter[str]) -> Counts:
    failed = Counter(before.failed)
    failed.subtract({reason: count for reason, count in erased.items() if reason not in (INDEXED, DUPLICATE)})
    failed[ERASED] += erased.total()
    return Counts(
        inputs=before.inputs,
        indexed=before.indexed - erased[INDEXED],
        duplicates=before.duplicates - erased[DUPLICATE],
        failed={reason: count for reason, count in sorted(failed.items()) if count},
    )


def read_erasure(index: CommittedIndex) -> Erasure | None:
    """Return the unfinished erasure that `store_erasure` wrote; None if there is no unfinished erasure.

    Raises:
        CorruptIndexError: the stored erasure is damaged, or does not match the index.
    """
    path = Layout(index.root).erasure
    try:
        value: dict[str, Any] = json.loads(read_index_file(index.root, path))
        rows = tuple(int(row) for row in value["rows"])
        erasure = Erasure(rows, Counts(**value["counts"]), dict(value["values"]))
        if problem := erasure.counts.problem():
            raise ValueError(problem)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptIndexError(f"cannot read {path}: {error!r}; delete this file and erase the rows again") from error
    row_ids = np.array(rows, dtype=np.int64)
    spec = index.manifest.spec
    fits = not rows or (row_ids.min() >= 0 and row_ids.max() < spec.rows and rows_in_use(row_ids, spec).all())
    names = {column.name for column in index.manifest.columns}
    if not fits or erasure.counts.inputs != index.manifest.counts.inputs or set(erasure.values) != names:
        raise CorruptIndexError(f"{path} does not match the index; delete this file and erase the rows again")
    return erasure


def duplicates_of(index: CommittedIndex, row_ids: Iterable[int]) -> list[int]:
    """Return the row ids of all rows that are duplicates of one of `row_ids`, including deleted rows."""
    originals = set(row_ids)
    tables = iter_stored_rows(index, ["row_id", "duplicate_of"])
    return [line["row_id"] for table in tables for line in table.to_pylist() if line["duplicate_of"] in originals]


def erase_rows(index: CommittedIndex, erasure: Erasure, ann: dict[str, Any]) -> Manifest:
    """Overwrite the data of the rows in `erasure`, replace `index.json`, and remove the stored erasure.

    Args:
        index: the index. The rows must be deleted, and there must be no earlier snapshot.
        erasure: the erasure. `store_erasure` must have stored it.
        ann: value of `ann` in `index.json` for a nearest-neighbour index without the rows.

    Raises:
        CorruptIndexError: a file with the rows is missing or damaged.
        OSError: a file cannot be written.
    """
    layout, manifest = Layout(index.root), index.manifest
    staging = layout.staging / "erasure"
    shutil.rmtree(staging, ignore_errors=True)
    entries: dict[str, FileEntry] = {}
    staged: dict[Path, Path] = {}
    for shard, positions in _by_shard(erasure, manifest.spec.shard_size):
        shard_erasure = _ShardErasure(layout, manifest, shard, positions, staging)
        shard_erasure.run()
        staged |= shard_erasure.staged
        entries |= {entry.path: entry for entry in shard_erasure.entries}
    tables = [_with_entries(layout, table, entries) for table in manifest.shard_tables]
    for new, path in staged.items():
        _replace(new, path)
    fsync_paths({path.parent for path in staged.values()})
    changed = replace(
        manifest,
        counts=erasure.counts,
        columns=tuple(replace(column, values=erasure.values[column.name]) for column in manifest.columns),
        ann=ann,
        shard_table=tables[0],
        further_tables=tuple(tables[1:]),
    )
    changed.write(layout)
    remove_unnamed_files(layout, [changed], tables=True)
    layout.erasure.unlink()
    fsync_path(layout.build)
    remove_build(layout)
    return changed


def _by_shard(erasure: Erasure, shard_size: int) -> Iterator[tuple[int, Positions]]:
    shards, positions = np.divmod(np.array(erasure.rows, dtype=np.int64), shard_size)
    for shard in np.unique(shards):
        yield int(shard), positions[shards == shard]


def _with_entries(layout: Layout, table: FileEntry, entries: dict[str, FileEntry]) -> FileEntry:
    """Write a copy of the shard table `table` with the new `entries`. Return `table` if no entry changes."""
    lines = read_shard_table(layout.root, table)
    if not any(file.path in entries for _, file in lines):
        return table
    return write_shard_table(layout, ((shard, entries.get(file.path, file)) for shard, file in lines))


class _ShardErasure:
    """Erases the rows at `positions` of one shard.

    Files of tokens and embeddings are overwritten in place. New versions of the other files are written to `staging`.

    Attributes:
        entries: new file entries for the shard table.
        staged: final path in the index of each file in `staging`, keyed by the path in `staging`.
    """

    def __init__(self, layout: Layout, manifest: Manifest, shard: int, positions: Positions, staging: Path) -> None:
        self._layout = layout
        self._spec = manifest.spec
        self._shard = shard
        self._positions = positions
        self._staging = staging
        self._rows = len(manifest.spec.shard_rows(shard))
        self.entries: list[FileEntry] = []
        self.staged: dict[Path, Path] = {}

    def run(self) -> None:
        is_indexed = self._erase_row_table()
        for name in self._spec.precisions:
            self._erase_tokens(name, is_indexed)
        hole = np.full(self._spec.embed_dim, np.nan, dtype="<f4").tobytes()
        path = self._layout.embedding_shard(self._shard)
        with _opened(path, self._staging) as fd:
            for position in self._positions.tolist():
                _write_at(fd, position * len(hole), hole)
        self.entries.append(FileEntry.of(self._layout, path))

    def _erase_row_table(self) -> NDArray[np.bool_]:
        """Erase the rows from the rows table. Return which positions are indexed afterwards, bool [shard_size]."""
        path = self._layout.rows_file(self._shard)
        try:
            table = read_table(read_index_file(self._layout.root, path))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CorruptIndexError(f"cannot read {path}: {error}; run 'edje-index verify'") from error
        if len(table) != self._rows:
            raise CorruptIndexError(f"{path} has {len(table)} rows instead of {self._rows}; run 'edje-index verify'")
        table = _without_data(table, self._positions)
        staged = self._stage(path)
        write_rows(staged, table)
        fsync_path(staged)
        self._add_staged(staged, path)
        is_indexed = np.zeros(self._spec.shard_size, dtype=np.bool_)
        is_indexed[: self._rows] = np.array(table["status"].to_pylist()) == INDEXED
        return is_indexed

    def _erase_tokens(self, name: str, is_indexed: NDArray[np.bool_]) -> None:
        token_codec = codec(name, self._spec.block_shape)
        size = token_codec.record_bytes
        path = self._layout.token_shard(name, self._shard, len(token_codec.record_shape))
        index_offset, _ = padded_shard_bytes(self._rows, self._spec.shard_size, size)
        with _opened(path, self._staging) as fd:
            for position in self._positions.tolist():
                _write_at(fd, position * size, erased_record(token_codec, position).tobytes())
            _write_at(fd, index_offset, shard_index_bytes(is_indexed, size))
            os.fsync(fd)  # overwrite the disk blocks before `_punch_hole` frees them
            for position in self._positions.tolist():
                freed = freed_bytes(position, size)
                _punch_hole(fd, freed.start, len(freed))
        self.entries.append(FileEntry.of(self._layout, path))
        checksums = read_checksums(self._layout, name, self._shard, self._rows).copy()
        for position in self._positions.tolist():
            checksums[position] = crc32c(erased_record(token_codec, position))
        path = self._layout.checksums(name, self._shard)
        staged = self._stage(path)
        write_bytes_atomic(staged, checksums.astype("<u4").tobytes())
        self._add_staged(staged, path)

    def _stage(self, path: Path) -> Path:
        staged = self._staging / self._layout.relative(path)
        staged.parent.mkdir(parents=True, exist_ok=True)
        return staged

    def _add_staged(self, staged: Path, path: Path) -> None:
        self.staged[staged] = path
        self.entries.append(replace(FileEntry.of(self._layout, staged), path=self._layout.relative(path)))


def _without_data(table: pa.Table, positions: Positions) -> pa.Table:
    """Return `table` with the rows at `positions` marked as failed. The other values of these rows become null."""
    is_erased = np.zeros(len(table), dtype=np.bool_)
    is_erased[positions] = True
    replacements: dict[str, Any] = {"uri": "", "status": FAILED, "reason": ERASED}
    for index, field in enumerate(table.schema):
        if field.name == "row_id":
            continue
        value = replacements.get(field.name)
        values = [
            value if erased else old for erased, old in zip(is_erased, table[field.name].to_pylist(), strict=True)
        ]
        table = table.set_column(index, field, pa.array(values, field.type))
    return table


@contextlib.contextmanager
def _opened(path: Path, staging: Path) -> Iterator[int]:
    """Open a file of the index for writing. Call fsync on the file at the end of the `with` block.

    A file with hard links in other indexes is replaced by a copy first, because other indexes must not change.
    """
    if path.lstat().st_nlink > 1:
        copy = staging / "copy"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        fsync_path(copy)
        copy.replace(path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with naming(path):
            yield fd
            os.fsync(fd)
    finally:
        os.close(fd)


def _replace(new: Path, path: Path) -> None:
    """Replace the file at `path` with `new`, then overwrite the replaced data with zeros.

    Data that other hard links still name is not overwritten.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        new.replace(path)
        if status.st_nlink == 1:
            for offset in range(0, status.st_size, len(_PIECE)):
                _write_at(fd, offset, _PIECE[: status.st_size - offset])
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_at(fd: int, offset: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _punch_hole(fd: int, offset: int, length: int) -> None:
    """Free the disk blocks of a byte range, if this is supported. Reads of the range return zeros."""
    if (fallocate := getattr(ctypes.CDLL(None), "fallocate", None)) is not None:
        keep_size_and_punch_hole = 3
        fallocate(fd, keep_size_and_punch_hole, ctypes.c_long(offset), ctypes.c_long(length))
