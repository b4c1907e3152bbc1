"""Checking an index: every file, checksum and row, and that zarr-python, if installed, opens the arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage_formats.codecs import codec, fill_record
from storage_formats.errors import CorruptIndexError
from storage_formats.format.checksum import crc32c_file, crc32c_rows
from storage_formats.format.layout import IndexSpec, Layout, padded_shard_bytes
from storage_formats.format.manifest import Counts, FileRecord, Manifest
from storage_formats.format.rows import DUPLICATE, INDEXED, failures_by_reason, read_shard_rows
from storage_formats.format.zarr_metadata import embedding_array_metadata, group_metadata, token_array_metadata
from storage_formats.reading.embeddings import read_shard_embeddings
from storage_formats.writing.token_shard import shard_index_bytes


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: the file, relative to the index.
        code: a short name of the kind of problem, for programs.
        message: what was found and what was expected.
    """

    path: str
    code: str
    message: str


def verify_index(root: str | Path, on_progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Every problem of the index at `root`; an empty list when it is sound.

    Reads every file. `on_progress(shards done, shards)` is called after each shard.

    Raises:
        UsageError, IncompleteIndexError: there is no finished index at `root`.
    """
    layout = Layout(Path(root))
    try:
        manifest = Manifest.load(root)
        begun = layout.manifest.read_bytes()
        table = manifest.shard_files(root)
    except CorruptIndexError as error:
        return [Problem("index.json", "manifest", str(error))]
    problems = list(_check_metadata(layout, manifest.spec))
    by_shard = _files_by_shard(table)
    totals = Counts(0, 0, 0)
    for shard in range(manifest.spec.shards):
        check = _ShardCheck(layout, manifest.spec, shard, by_shard.get(shard, {}))
        problems += check.run()
        totals = _add(totals, check.counts)
        if on_progress:
            on_progress(shard + 1, manifest.spec.shards)
    if not problems and totals != manifest.counts:
        problems.append(Problem("index.json", "counts", f"rows say {totals}, the manifest says {manifest.counts}"))
    problems += _check_strays(layout, manifest, by_shard)
    problems += _check_ann(layout, manifest)
    if problems and layout.manifest.read_bytes() != begun:
        return [Problem("index.json", "changed", "the index was changed while it was verified; verify it again")]
    return problems


def _files_by_shard(table: pa.Table) -> dict[int, dict[str, FileRecord]]:
    found: dict[int, dict[str, FileRecord]] = {}
    for line in table.to_pylist():
        record = FileRecord(line["path"], line["bytes"], line["crc32c"])
        found.setdefault(line["shard"], {})[record.path] = record
    return found


def _add(left: Counts, right: Counts) -> Counts:
    reasons = sorted({*left.failed, *right.failed})
    failed = {reason: left.failed.get(reason, 0) + right.failed.get(reason, 0) for reason in reasons}
    return Counts(left.inputs + right.inputs, left.indexed + right.indexed, left.duplicates + right.duplicates, failed)


def _check_metadata(layout: Layout, spec: IndexSpec) -> Iterator[Problem]:
    """The documents are what SPEC.md says; zarr-python, if it is installed, opens them with the same meaning."""
    expected: dict[Path, dict[str, Any]] = {
        layout.tokens / "zarr.json": group_metadata(),
        layout.embeddings / "zarr.json": embedding_array_metadata(spec),
    }
    for name in spec.precisions:
        expected[layout.token_array(name) / "zarr.json"] = token_array_metadata(spec, name)
    for path, document in expected.items():
        where = layout.relative(path)
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            yield Problem(where, "zarr-metadata", f"cannot be read: {error}")
            continue
        if found != document:
            yield Problem(where, "zarr-metadata", "is not the document that the manifest and SPEC.md call for")
        elif document["node_type"] == "array":
            yield from _check_stock_reader(path.parent, where, document)


def _check_stock_reader(array_dir: Path, where: str, document: dict[str, Any]) -> Iterator[Problem]:
    try:
        import zarr
    except ModuleNotFoundError:  # a light install: the caller has compared the document with SPEC.md
        return
    try:
        array = zarr.open_array(str(array_dir), mode="r")
    except Exception as error:  # whatever a third-party reader raises is the finding
        yield Problem(where, "zarr-reader", f"zarr-python cannot open the array: {error}")
        return
    if list(array.shape) != document["shape"] or str(array.dtype) != document["data_type"]:
        yield Problem(where, "zarr-reader", f"zarr-python sees {array.dtype} {list(array.shape)}")


class _ShardCheck:
    """Every check of one shard. `counts` is what its rows table says."""

    def __init__(self, layout: Layout, spec: IndexSpec, shard: int, files: dict[str, FileRecord]) -> None:
        self._layout = layout
        self._spec = spec
        self._shard = shard
        self._files = files
        self._rows = spec.shard_rows(shard)
        self.counts = Counts(0, 0, 0)

    def run(self) -> list[Problem]:
        expected = [self._layout.embedding_shard(self._shard), self._layout.rows_file(self._shard)]
        for name in self._spec.precisions:
            expected += [self._token_path(name), self._layout.checksums(name, self._shard)]
        broken = [problem for path in expected for problem in self._check_file(path)]
        known = {self._layout.relative(path) for path in expected}
        for path in sorted(set(self._files) - known):
            broken.append(Problem(path, "shard-table", "is listed in the shard table and is no file of this index"))
        damaged = {problem.path for problem in broken}
        indexed = None
        if self._layout.relative(self._layout.rows_file(self._shard)) not in damaged:
            try:
                indexed = self._check_rows(broken)
            except CorruptIndexError as error:
                broken.append(self._problem(self._layout.rows_file(self._shard), "rows", str(error)))
        for name in self._spec.precisions:
            broken += self._check_tokens(name, indexed)
        if indexed is not None:
            broken += self._check_embeddings(indexed)
        return broken

    def _token_path(self, name: str) -> Path:
        return self._layout.token_shard(name, self._shard, len(codec(name, self._spec.block_shape).record_shape))

    def _problem(self, path: Path, code: str, message: str) -> Problem:
        return Problem(self._layout.relative(path), code, message)

    def _check_file(self, path: Path) -> Iterator[Problem]:
        record = self._files.get(self._layout.relative(path))
        if record is None:
            yield self._problem(path, "shard-table", "is missing from the shard table")
            return
        try:
            length, crc = crc32c_file(path)
        except OSError as error:
            yield self._problem(path, "missing-file", f"cannot be read: {error.strerror}")
            return
        if length != record.bytes:
            yield self._problem(path, "length", f"has {length} bytes, {record.bytes} were committed")
        elif crc != record.crc32c:
            yield self._problem(path, "checksum", f"has CRC-32C {crc:08x}, {record.crc32c:08x} was committed")

    def _check_rows(self, broken: list[Problem]) -> NDArray[np.bool_]:
        table = read_shard_rows(self._layout, self._shard)
        path = self._layout.rows_file(self._shard)
        if table["row_id"].to_pylist() != list(self._rows):
            raise CorruptIndexError(f"row ids are not {self._rows.start}..{self._rows.stop - 1} in order")
        statuses = table["status"].to_pylist()
        self.counts = Counts(
            inputs=len(self._rows),
            indexed=statuses.count(INDEXED),
            duplicates=statuses.count(DUPLICATE),
            failed=failures_by_reason(table),
        )
        try:
            self.counts.check()
        except CorruptIndexError as error:
            broken.append(self._problem(path, "counts", str(error)))
        return np.array([status == INDEXED for status in statuses])

    def _check_tokens(self, name: str, indexed: NDArray[np.bool_] | None) -> Iterator[Problem]:
        """Block checksums, shard index and holes, which say which block is bad where the file's checksum is."""
        entry = codec(name, self._spec.block_shape)
        path, rows = self._token_path(name), len(self._rows)
        index_offset, length = padded_shard_bytes(rows, self._spec.shard_size, entry.record_bytes)
        try:
            data = np.fromfile(path, dtype=np.uint8)
            sums = np.fromfile(self._layout.checksums(name, self._shard), dtype="<u4")
        except OSError:
            return  # told by _check_file
        if data.size != length or sums.size != rows:
            return  # the same
        records = data[: rows * entry.record_bytes].reshape(rows, entry.record_bytes)
        for position in np.flatnonzero(crc32c_rows(records) != sums):
            yield self._problem(path, "block-checksum", f"block of row {self._rows.start + position} is damaged")
        if indexed is None:
            return
        present = np.zeros(self._spec.shard_size, dtype=np.bool_)
        present[:rows] = indexed
        if data[index_offset:].tobytes() != shard_index_bytes(present, entry.record_bytes):
            yield self._problem(path, "shard-index", "the shard index contradicts the rows table")
        for position in np.flatnonzero(~indexed):
            if (records[position] != fill_record(entry)[0]).any():
                yield self._problem(path, "hole", f"row {self._rows.start + position} is a hole and holds data")

    def _check_embeddings(self, indexed: NDArray[np.bool_]) -> Iterator[Problem]:
        path = self._layout.embedding_shard(self._shard)
        try:
            values = read_shard_embeddings(self._layout, self._spec, self._shard)
        except CorruptIndexError:
            return  # told by _check_file
        finite = np.asarray(np.isfinite(values).all(axis=1))
        for position in np.flatnonzero(finite != indexed):
            state = "is a hole and has an embedding" if finite[position] else "is indexed and has no embedding"
            yield self._problem(path, "embedding", f"row {self._rows.start + position} {state}")


def _check_strays(layout: Layout, manifest: Manifest, by_shard: dict[int, dict[str, FileRecord]]) -> Iterator[Problem]:
    """Files in the data folders that no commit put there; what a run under way made, or has yet to remove, is none."""
    known = {path for files in by_shard.values() for path in files} | {manifest.shard_table.path}
    folders = [layout.rows, layout.embeddings, layout.tokens, layout.root / "checksums", layout.root / "manifest"]
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        where = layout.relative(path)
        in_other_precision = _precision_of(where) not in (None, *manifest.spec.precisions)
        converting = layout.build.exists() and (in_other_precision or path.parent == layout.root / "manifest")
        if path.is_file() and path.name != "zarr.json" and where not in known and not converting:
            yield Problem(where, "stray-file", "is no file of this index; delete it")


def _precision_of(path: str) -> str | None:
    """The precision that a relative path belongs to."""
    first, _, rest = path.partition("/")
    return rest.partition("/")[0] if first in ("tokens", "checksums") and "/" in rest else None


def _check_ann(layout: Layout, manifest: Manifest) -> Iterator[Problem]:
    for value in manifest.ann.get("files", []):
        record = FileRecord.from_json(value)
        try:
            length, crc = crc32c_file(layout.root / record.path)
        except OSError as error:
            yield Problem(record.path, "missing-file", f"cannot be read: {error.strerror}")
            continue
        if (length, crc) != (record.bytes, record.crc32c):
            yield Problem(record.path, "checksum", "is not the file that was committed; it can be built again")
    vectors = manifest.ann.get("vectors")
    if vectors is not None and vectors != manifest.counts.indexed:
        yield Problem("ann", "counts", f"holds {vectors} vectors, {manifest.counts.indexed} rows are indexed")
