"""Verification of all files of an index."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Codec, Records, codec, fill_record
from storage_formats.errors import CorruptIndexError, EdjeError
from storage_formats.format.checksum import crc32c_rows, crc32c_stream, read_checksums
from storage_formats.format.index_files import open_index_file, read_index_file
from storage_formats.format.layout import IndexSpec, Layout, padded_shard_bytes
from storage_formats.format.manifest import CommittedIndex, Counts, Manifest
from storage_formats.format.row_map import check_row_map
from storage_formats.format.rows import DUPLICATE, ERASED, INDEXED, failures_by_reason, read_shard_rows
from storage_formats.format.shard_table import FileEntry, read_shard_tables
from storage_formats.format.tombstones import read_tombstones
from storage_formats.format.zarr_metadata import zarr_documents
from storage_formats.reading.embeddings import read_shard_embeddings
from storage_formats.writing.snapshots import kept_snapshots, named_files
from storage_formats.writing.token_shard import erased_record, shard_index_bytes

_MAX_ZARR_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20
_SHARD_TABLE = re.compile(r"manifest/shards-[0-9a-f]{8}\.parquet")


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


def verify_index(root: str | Path, on_progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Check every file of an index.

    Args:
        root: directory of the index.
        on_progress: called as `on_progress(done, total)` after each shard. Both arguments are numbers of shards.

    Returns:
        All problems that were found. The list is empty if the index is undamaged.

    Raises:
        UsageError: there is no index at `root`.
        IncompleteIndexError: the build of the index has not finished.

    Example:
        >>> from storage_formats import verify_index
        >>> from storage_formats.example import example_index
        >>> verify_index(example_index())
        []
    """
    layout = Layout(Path(root))
    try:
        manifest = Manifest.load(root)
        manifest_bytes = read_index_file(root, layout.manifest)
        shard_files = read_shard_tables(root, manifest.shard_tables)
    except (CorruptIndexError, OSError) as error:
        return [Problem("index.json", "manifest", str(error))]
    problems = [*_check_erasure(layout), *_check_metadata(layout, manifest.spec)]
    by_shard = _files_by_shard(shard_files)
    totals, values = Counts(0, 0, 0), Counter[str]()
    shards = list(manifest.spec.shard_numbers())
    for done, shard in enumerate(shards, 1):
        check = _ShardCheck(layout, manifest, shard, by_shard.get(shard, {}))
        problems += check.run()
        totals = _add(totals, check.counts)
        values.update(check.values)
        if on_progress:
            on_progress(done, len(shards))
    if not problems and totals != manifest.counts:
        problems.append(
            Problem(
                "index.json",
                "counts",
                f"lists the counts {asdict(manifest.counts)}, but the rows tables have {asdict(totals)}",
            )
        )
    if not problems:
        problems += _check_columns(manifest, values)
    problems += _check_tombstones(root, manifest)
    problems += _check_row_maps(root, manifest)
    problems += _check_strays(layout, manifest)
    problems += _check_ann(layout, manifest)
    if problems and read_index_file(root, layout.manifest) != manifest_bytes:
        return [Problem("index.json", "changed", "changed while the index was verified; verify the index again")]
    return problems


def _check_erasure(layout: Layout) -> Iterator[Problem]:
    if layout.erasure.exists():
        message = "belongs to an unfinished erasure; erase the same rows again to finish the erasure"
        yield Problem(layout.relative(layout.erasure), "erasure", message)


def _files_by_shard(shard_files: list[tuple[int, FileEntry]]) -> dict[int, dict[str, FileEntry]]:
    by_shard: dict[int, dict[str, FileEntry]] = {}
    for shard, file in shard_files:
        by_shard.setdefault(shard, {})[file.path] = file
    return by_shard


def _add(left: Counts, right: Counts) -> Counts:
    reasons = sorted({*left.failed, *right.failed})
    failed = {reason: left.failed.get(reason, 0) + right.failed.get(reason, 0) for reason in reasons}
    return Counts(left.inputs + right.inputs, left.indexed + right.indexed, left.duplicates + right.duplicates, failed)


def _check_metadata(layout: Layout, spec: IndexSpec) -> Iterator[Problem]:
    """Compare each `zarr.json` with SPEC.md, and check that zarr-python can open the arrays."""
    for path, document in zarr_documents(layout, spec).items():
        where = layout.relative(path)
        try:
            actual = json.loads(read_index_file(layout.root, path, max_bytes=_MAX_ZARR_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            yield Problem(where, "zarr-metadata", f"cannot be read: {error}")
            continue
        if layout.build.exists() and _differs_in_rows(actual, document):
            continue
        if actual != document:
            yield Problem(where, "zarr-metadata", "is not the document that SPEC.md prescribes for this manifest")
        elif document["node_type"] == "array":
            yield from _check_stock_reader(path.parent, where, document)


def _differs_in_rows(actual: Any, document: dict[str, Any]) -> bool:
    """Return True if two Zarr documents differ only in the number of rows, which happens during an append."""
    try:
        rows, *record_shape = actual["shape"]
        expected_rows = document["shape"][0]
    except (KeyError, TypeError, ValueError):
        return False
    same_otherwise = {**actual, "shape": [expected_rows, *record_shape]} == document
    return same_otherwise and isinstance(rows, int) and rows > 0 and rows != expected_rows


def _check_stock_reader(array_dir: Path, where: str, document: dict[str, Any]) -> Iterator[Problem]:
    try:
        import zarr
    except ModuleNotFoundError:  # a light installation; the caller has compared the document with SPEC.md
        return
    try:
        array = zarr.open_array(str(array_dir), mode="r")
    except Exception as error:  # a third-party reader may raise anything
        yield Problem(where, "zarr-reader", f"cannot be opened by zarr-python: {error}")
        return
    if list(array.shape) != document["shape"] or str(array.dtype) != document["data_type"]:
        expected = f"{document['data_type']} {document['shape']}"
        message = f"is read by zarr-python as {array.dtype} {list(array.shape)} instead of {expected}"
        yield Problem(where, "zarr-reader", message)


def _check_columns(manifest: Manifest, values: Counter[str]) -> Iterator[Problem]:
    """Compare the numbers of source values in `manifest` with `values`, the numbers in the rows tables."""
    for column in manifest.columns:
        if column.values != values[column.name]:
            message = (
                f"lists {column.values} values of column {column.name}, but the rows tables have {values[column.name]}"
            )
            yield Problem("index.json", "columns", message)


class _ShardCheck:
    """Checks the files of one shard.

    Attributes:
        counts: after `run`, the numbers of inputs in the rows table of the shard.
        values: after `run`, the number of values of each source column in the shard.
    """

    def __init__(self, layout: Layout, manifest: Manifest, shard: int, files: dict[str, FileEntry]) -> None:
        self._layout = layout
        self._columns = manifest.columns
        self._spec = spec = manifest.spec
        self._shard = shard
        self._files = files
        self._rows = spec.shard_rows(shard)
        self._is_erased: NDArray[np.bool_] | None = None  # known once the rows table has been read
        self.counts = Counts(0, 0, 0)
        self.values: dict[str, int] = {}

    def run(self) -> list[Problem]:
        expected = [self._layout.embedding_shard(self._shard), self._layout.rows_file(self._shard)]
        for name in self._spec.precisions:
            expected += [self._token_path(name), self._layout.checksums(name, self._shard)]
        problems = [problem for path in expected for problem in self._check_file(path)]
        expected_paths = {self._layout.relative(path) for path in expected}
        for path in sorted(set(self._files) - expected_paths):
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
        return problems

    def _token_path(self, name: str) -> Path:
        return self._layout.token_shard(name, self._shard, len(codec(name, self._spec.block_shape).record_shape))

    def _problem(self, path: Path, code: str, message: str) -> Problem:
        return Problem(self._layout.relative(path), code, message)

    def _check_file(self, path: Path) -> Iterator[Problem]:
        entry = self._files.get(self._layout.relative(path))
        if entry is None:
            yield self._problem(path, "shard-table", "is not listed in the shard table")
            return
        try:
            with open_index_file(self._layout.root, path) as file:
                length = os.fstat(file.fileno()).st_size
                crc = crc32c_stream(file) if length == entry.bytes else None
        except OSError as error:
            yield self._problem(path, "missing-file", f"cannot be read: {error.strerror}")
            return
        if crc is None:
            yield self._problem(path, "length", f"has {length} bytes instead of the {entry.bytes} that were committed")
        elif crc != entry.crc32c:
            yield self._problem(path, "checksum", f"has CRC-32C {crc:08x} instead of {entry.crc32c:08x}")

    def _check_rows(self, problems: list[Problem]) -> NDArray[np.bool_]:
        table = read_shard_rows(self._layout, self._shard, source_columns=self._columns)
        path = self._layout.rows_file(self._shard)
        # Numbers are compared first: a claimed number of rows must not become a list.
        if len(table) != len(self._rows) or table["row_id"].to_pylist() != list(self._rows):
            raise CorruptIndexError(
                f"the rows table does not contain the row ids {self._rows.start} to {self._rows.stop - 1} "
                "in ascending order"
            )
        self.values = {column.name: len(table) - table[column.name].null_count for column in self._columns}
        statuses = table["status"].to_pylist()
        self._is_erased = np.array([reason == ERASED for reason in table["reason"].to_pylist()])
        self.counts = Counts(
            inputs=len(self._rows),
            indexed=statuses.count(INDEXED),
            duplicates=statuses.count(DUPLICATE),
            failed=failures_by_reason(table),
        )
        try:
            self.counts.check()
        except CorruptIndexError as error:
            problems.append(self._problem(path, "counts", str(error)))
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
                if not self._is_hole(token_codec, first + int(position), records[position]):
                    row_id = self._rows.start + first + position
                    yield self._problem(path, "hole", f"has data for row {row_id}, which is a hole")

    def _is_hole(self, token_codec: Codec, position: int, record: Records) -> bool:
        if (record == fill_record(token_codec)[0]).all():
            return True
        return (
            self._is_erased is not None
            and bool(self._is_erased[position])
            and bool((record == erased_record(token_codec, position)).all())
        )

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


def _check_tombstones(root: str | Path, manifest: Manifest) -> Iterator[Problem]:
    try:
        read_tombstones(Path(root), manifest.spec, manifest.snapshot)
    except CorruptIndexError as error:
        yield Problem(manifest.snapshot.deleted.path if manifest.snapshot.deleted else "", "deleted-rows", str(error))


def _check_row_maps(root: str | Path, manifest: Manifest) -> Iterator[Problem]:
    for row_map in manifest.row_maps:
        try:
            check_row_map(CommittedIndex(Path(root), manifest), row_map)
        except CorruptIndexError as error:
            yield Problem(row_map.file.path, "row-map", str(error))


def _check_strays(layout: Layout, manifest: Manifest) -> Iterator[Problem]:
    """Yield a problem for each data file that belongs to no snapshot and no unfinished change."""
    try:
        named = named_files(layout, kept_snapshots(CommittedIndex(layout.root, manifest)))
    except EdjeError as error:
        yield Problem("snapshots", "snapshot", f"contains a snapshot that cannot be read: {error}")
        return
    for path in (path for folder in layout.data_folders() for path in sorted(folder.rglob("*"))):
        where = layout.relative(path)
        is_table = _SHARD_TABLE.fullmatch(where) is not None  # a conversion leaves the one before
        belongs = path.name == "zarr.json" or is_table or where in named
        if not path.is_dir() and not belongs and not (layout.build.exists() and _is_unfinished(where, manifest)):
            yield Problem(where, "stray-file", "does not belong to this index; delete the file")


def _is_unfinished(path: str, manifest: Manifest) -> bool:
    """Return True if the file at `path` may belong to an unfinished change or conversion."""
    if path.startswith(("manifest/", "ann/")) or _precision_of(path) not in (None, *manifest.spec.precisions):
        return True
    numbers = re.findall(r"\d+", path.rpartition("/")[2])
    return bool(numbers) and int(numbers[0]) >= manifest.spec.shards


def _precision_of(path: str) -> str | None:
    first, _, rest = path.partition("/")
    return rest.partition("/")[0] if first in ("tokens", "checksums") and "/" in rest else None


def _check_ann(layout: Layout, manifest: Manifest) -> Iterator[Problem]:
    for entry in manifest.ann_files:
        try:
            with open_index_file(layout.root, layout.root / entry.path) as file:
                is_sound = os.fstat(file.fileno()).st_size == entry.bytes and crc32c_stream(file) == entry.crc32c
        except OSError as error:
            yield Problem(entry.path, "missing-file", f"cannot be read: {error.strerror}")
            continue
        if not is_sound:
            yield Problem(entry.path, "checksum", "is not the committed file; build the nearest-neighbour index again")
    vectors = manifest.ann.get("vectors")
    if vectors is not None and vectors != manifest.counts.indexed:
        yield Problem("ann", "counts", f"has {vectors} vectors, but {manifest.counts.indexed} rows are indexed")
