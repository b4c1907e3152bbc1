"""`index.json`, the manifest of an index (SPEC.md section 4)."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from storage_formats.arguments import as_count, as_path, shown
from storage_formats.atomic import write_json_atomic
from storage_formats.codecs import codec
from storage_formats.errors import (
    CorruptIndexError,
    IncompleteIndexError,
    UsageError,
    cannot_read,
)
from storage_formats.format.checksum import json_checksum
from storage_formats.format.downloads import download
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import (
    FORMAT,
    FORMAT_VERSION,
    OFFSET_VERSION,
    IndexSpec,
    Layout,
    OffsetBlock,
    Segment,
)
from storage_formats.format.shard_table import FileEntry, read_shard_table
from storage_formats.format.source_columns import SourceColumn, check_columns
from storage_formats.format.tombstones import Tombstones, read_tombstones
from storage_formats.remote.objects import ObjectFolder
from storage_formats.remote.urls import IndexLocation

MAX_MANIFEST_BYTES = 64 << 20
SNAPSHOT_FILE = re.compile(r"snapshots/\d+\.json")
# major format versions
_READ_MAJORS = ("1", "2")
# the shard table has 32 bits for a shard
_MAX_SHARDS = 1 << 31


@dataclass(frozen=True)
class Counts:
    """The number of inputs by outcome. `failed` maps each reason to a number of failed
    inputs.

    `inputs` is the total: `indexed` + `duplicates` + the sum of the numbers in
    `failed`.
    """

    inputs: int
    indexed: int
    duplicates: int
    failed: dict[str, int] = field(default_factory=dict)

    @property
    def failed_total(self) -> int:
        return sum(self.failed.values())

    def problem(self) -> str | None:
        """Return what is wrong if `inputs` is not the sum of the other numbers;
        None if it is.
        """
        total = self.indexed + self.duplicates + self.failed_total
        if total == self.inputs:
            return None
        return (
            f"the counts of inputs do not add up: {self.indexed} indexed +"
            f" {self.duplicates} duplicates + {self.failed_total} failed = {total}, not"
            f" {self.inputs}"
        )


@dataclass(frozen=True)
class Snapshot:
    """A state of an index (SPEC.md section 12). The defaults describe an index directly
    after its build.

    Attributes:
        change: description of the change that made the snapshot, with the members
            `kind`, `created` and more. Empty for a build.
        next_shard: lowest shard number that no snapshot has used so far. 0 means the
            number of shards of the index.
        deleted: file entry of the tombstones file. None if no row is deleted.
        oldest: number of the oldest kept snapshot. None if an earlier version of the
            package wrote the index.
    """

    number: int = 0
    change: dict[str, Any] = field(default_factory=dict)
    next_shard: int = 0
    deleted: FileEntry | None = None
    deleted_rows: int = 0
    oldest: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RowMap:
    """The entry of a row map in the manifest. Each compaction writes one row map
    (SPEC.md section 12.1).

    Attributes:
        first_row: lowest new row id. The row map translates row ids below `first_row`.
        is_partial: True if only some shards were compacted. Row ids that are not listed
            did not change.
    """

    file: FileEntry
    first_row: int
    is_partial: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return this entry as a JSON object."""
        value = {**self.file.to_json(), "first_row": self.first_row}
        return {**value, "partial": True} if self.is_partial else value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RowMap:
        """Return the entry described by `value`, a result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: a member is missing or not valid.
        """
        return cls(
            FileEntry.from_json(value),
            int(value["first_row"]),
            bool(value.get("partial", False)),
        )


class AnnFile(TypedDict, total=False):
    """The entry of a file of the nearest-neighbour index (SPEC.md section 10)."""

    path: str
    bytes: int
    crc32c: str
    vectors: int
    similarity: float


class Recall(TypedDict, total=False):
    """The measured recall of a nearest-neighbour index (SPEC.md section 10)."""

    k: int
    value: float
    target: float


class Ann(TypedDict, total=False):
    """The member `ann` of `index.json`, which describes the nearest-neighbour index
    (SPEC.md section 10). Other members are kept.
    """

    kind: str
    metric: str
    factory: str
    vectors: int
    probes: int
    recall: Recall
    files: list[AnnFile]


@dataclass(frozen=True)
class _Precision:
    name: str
    record_bytes: int
    encoded_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Segment:
    first_row: int
    rows: int
    shard_table: FileEntry


@dataclass(frozen=True)
class _Document:
    """The members of `index.json` (SPEC.md section 4), without the checksum."""

    format: str
    format_version: str
    created_by: str
    rows: int
    shard_size: int
    shards: int
    block_shape: tuple[int, ...]
    embed_dim: int
    precisions: tuple[_Precision, ...]
    counts: Counts
    model: dict[str, Any]
    settings: dict[str, Any]
    plan: str
    shard_table: FileEntry
    ann: Ann
    snapshot: int | None = None
    change: dict[str, Any] | None = None
    next_shard: int | None = None
    oldest_snapshot: int | None = None
    deleted: dict[str, Any] | None = None
    row_maps: tuple[RowMap, ...] = ()
    segments: tuple[_Segment, ...] = ()
    columns: tuple[SourceColumn, ...] = ()
    offset: dict[str, Any] | None = None


@dataclass(frozen=True)
class Manifest:
    """The contents of `index.json`. SPEC.md section 4 describes the fields.

    Attributes:
        encoded_from: for each converted precision, the precisions from which its blocks
            were converted, in the order of the conversions.
        shard_table: file entry of the shard table of the first segment.
        further_tables: file entries of the shard tables of the other segments.
        columns: source columns of the rows table.
        row_maps: entries of the row maps, oldest first (SPEC.md section 12.1).

    Examples:
        >>> from storage_formats import Manifest
        >>> manifest = Manifest.load("photos.edje")
        >>> manifest.spec.block_shape, manifest.counts.indexed, manifest.counts.failed
        ((4, 16), 6, {})
    """

    spec: IndexSpec
    counts: Counts
    model: dict[str, Any]
    settings: dict[str, Any]
    plan: str
    shard_table: FileEntry
    ann: Ann
    created_by: str
    format_version: str = FORMAT_VERSION
    encoded_from: dict[str, tuple[str, ...]] = field(default_factory=dict)
    snapshot: Snapshot = field(default_factory=Snapshot)
    further_tables: tuple[FileEntry, ...] = ()
    columns: tuple[SourceColumn, ...] = ()
    row_maps: tuple[RowMap, ...] = ()

    @classmethod
    def load(cls, root: str | Path, snapshot: int | None = None) -> Manifest:
        """Read the manifest of the index at `root`.

        Args:
            root: directory of the index.
            snapshot: number of the snapshot. None reads the manifest of the current
                snapshot.

        Raises:
            UsageError: there is no index at `root`, the snapshot does not exist, or
                this version of the package cannot read the format version of the index.
            IncompleteIndexError: the build of the index has not finished.
            CorruptIndexError: `index.json` is damaged.
        """
        layout = Layout(as_path(root, "root"))
        try:
            current = cls._read(layout, layout.manifest)
        except FileNotFoundError:
            if layout.build.is_dir():
                raise IncompleteIndexError(
                    f"the index at {root} is unfinished; if no process is writing it,"
                    " run the same command again to finish it, or delete the directory"
                ) from None
            if layout.root.exists():
                raise UsageError(
                    f"{root} is not an EDJE index (it has no index.json)"
                ) from None
            raise UsageError(f"there is no index at {root}") from None
        number = (
            current.snapshot.number
            if snapshot is None
            else as_count(snapshot, "snapshot", least=0)
        )
        if number == current.snapshot.number:
            return current
        try:
            return cls._read(layout, layout.snapshot(number))
        except FileNotFoundError:
            numbers = ", ".join(
                map(str, [*earlier_snapshots(layout, current), current.snapshot.number])
            )
            raise UsageError(
                f"{root} has no snapshot {snapshot}; choose one of: {numbers}",
                parameter="snapshot",
            ) from None

    @classmethod
    def _read(cls, layout: Layout, path: Path) -> Manifest:
        try:
            data = read_index_file(layout.root, path, max_bytes=MAX_MANIFEST_BYTES)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(str(path)) from error
        except OSError as error:
            raise cannot_read(path, error, "restore the file from a backup") from error
        return cls.parse(data, path)

    @classmethod
    def parse(cls, data: bytes, where: IndexLocation) -> Manifest:
        """Read a manifest from the bytes of an `index.json`. `where` names the file in
        error messages.

        Raises:
            UsageError, CorruptIndexError: see `load`.
        """
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CorruptIndexError(
                f"cannot read {where}: {error}; restore the file from a backup"
            ) from error
        return _parse(where, value)

    @property
    def shard_tables(self) -> tuple[FileEntry, ...]:
        """The file entries of the shard tables, one per segment."""
        return (self.shard_table, *self.further_tables)

    def write(self, layout: Layout) -> None:
        """Write `index.json`. This commits the index."""
        spec = self.spec
        document = _Document(
            format=FORMAT,
            format_version=self.format_version,
            created_by=self.created_by,
            rows=spec.rows,
            shard_size=spec.shard_size,
            shards=spec.shards,
            block_shape=spec.block_shape,
            embed_dim=spec.embed_dim,
            precisions=tuple(
                _Precision(
                    name,
                    codec(name, spec.block_shape).record_bytes,
                    tuple(self.encoded_from.get(name, ())),
                )
                for name in spec.precisions
            ),
            counts=self.counts,
            model=self.model,
            settings=self.settings,
            plan=self.plan,
            shard_table=self.shard_table,
            ann=self.ann,
            segments=tuple(
                _Segment(segment.first_row, segment.rows, table)
                for segment, table in zip(
                    spec.segments, self.shard_tables, strict=bool(spec.segments)
                )
            ),
            row_maps=self.row_maps,
            columns=self.columns,
        )
        for file in self.offset_files:
            assert spec.offset is not None
            document = replace(
                document,
                format_version=OFFSET_VERSION,
                offset={**file.to_json(), "precisions": list(spec.offset.precisions)},
            )
        snapshot = self.snapshot
        if snapshot.number or snapshot.change:
            document = replace(
                document,
                snapshot=snapshot.number,
                change=snapshot.change,
                next_shard=snapshot.next_shard,
                oldest_snapshot=snapshot.oldest,
            )
            if snapshot.deleted is not None:
                rows = {"rows": snapshot.deleted_rows}
                deleted = {**snapshot.deleted.to_json(), **rows}
                document = replace(document, deleted=deleted)
        value = _to_json(document)
        write_json_atomic(layout.manifest, {**value, "crc32c": json_checksum(value)})

    @property
    def ann_files(self) -> list[FileEntry]:
        """The file entries of the nearest-neighbour index."""
        return [FileEntry.from_json(file) for file in self.ann.get("files", [])]

    @property
    def offset_files(self) -> list[FileEntry]:
        """The file entry of the values of the offset block, if the index has one."""
        if self.spec.offset is None:
            return []
        layout = Layout(Path())
        path = layout.relative(layout.offset_values)
        m, d = self.spec.block_shape
        return [FileEntry(path, 4 * m * d, self.spec.offset.crc32c)]

    @property
    def own_files(self) -> list[FileEntry]:
        """The file entries of all files that no shard table lists."""
        deleted = [] if self.snapshot.deleted is None else [self.snapshot.deleted]
        return [
            *self.shard_tables,
            *deleted,
            *(row_map.file for row_map in self.row_maps),
            *self.ann_files,
            *self.offset_files,
        ]


@dataclass(frozen=True)
class CommittedIndex:
    """A finished index, opened at one snapshot.

    Attributes:
        root: absolute path of the index. For an index on an object store, this is the
            local directory that caches the files of the snapshot, apart from tokens;
            see `fetch`.
        remote: the objects of the index; None for an index on a file system.
    """

    root: Path
    manifest: Manifest
    remote: ObjectFolder | None = None

    @property
    def location(self) -> IndexLocation:
        """URL of the index, or its absolute path."""
        return self.root if self.remote is None else self.remote.url

    @functools.cached_property
    def deleted(self) -> Tombstones:
        """The tombstones of the snapshot, read at the first access."""
        self.fetch(filter(None, [self.manifest.snapshot.deleted]))
        return read_tombstones(self.root, self.manifest.spec, self.manifest.snapshot)

    @classmethod
    def open(cls, root: str | Path, snapshot: int | None = None) -> CommittedIndex:
        """Open the index at `root`. For the arguments and errors, see
        `Manifest.load`.
        """
        return cls(as_path(root, "root").absolute(), Manifest.load(root, snapshot))

    def shard_files(self) -> list[tuple[int, FileEntry]]:
        """Return a pair (shard number, file entry) for each line of the shard
        tables.
        """
        self.fetch(self.manifest.shard_tables)
        return [
            line
            for table in self.manifest.shard_tables
            for line in read_shard_table(self.root, table)
        ]

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Download the committed files `entries` that `root` lacks. Does nothing for an
        index on a file system.

        Call this before you read one of these files.
        """
        if self.remote is not None:
            download(self.remote, self.root, entries)


def kept_snapshots(index: CommittedIndex) -> list[Manifest]:
    """Return the manifests of all kept snapshots, oldest first. The last manifest is
    that of `index`.

    Raises:
        UsageError, CorruptIndexError: a snapshot cannot be read, see `Manifest.load`.
    """
    if index.remote is None:
        numbers = earlier_snapshots(Layout(index.root), index.manifest)
        return [
            *(Manifest.load(index.root, number) for number in numbers),
            index.manifest,
        ]
    manifests = []
    for key in sorted(
        key
        for key in index.remote.list_sizes("snapshots")
        if SNAPSHOT_FILE.fullmatch(key)
    ):
        try:
            # a copy has removed the snapshot
            with contextlib.suppress(FileNotFoundError):
                data = index.remote.read(key, MAX_MANIFEST_BYTES).data
                manifests.append(Manifest.parse(data, index.remote.url_of(key)))
        except OSError as error:
            raise CorruptIndexError(
                f"{index.remote.url_of(key)} is not the manifest of a snapshot:"
                f" {error.strerror}; delete this object"
            ) from error
    current = index.manifest.snapshot.number
    return [
        *(manifest for manifest in manifests if manifest.snapshot.number < current),
        index.manifest,
    ]


def earlier_snapshots(layout: Layout, current: Manifest) -> list[int]:
    """Return the numbers of the snapshots on disk that are older than `current`,
    ascending.
    """
    numbers = [
        int(path.stem)
        for path in layout.snapshot(0).parent.glob("*.json")
        if path.stem.isdecimal()
    ]
    return sorted(
        number
        for number in numbers
        if (current.snapshot.oldest or 0) <= number < current.snapshot.number
    )


def _parse(where: IndexLocation, value: Any) -> Manifest:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UsageError(
            f"{where} is not the manifest of an EDJE index; give the path of an EDJE"
            " index"
        )
    format_version = str(value.get("format_version"))
    if format_version.split(".")[0] not in _READ_MAJORS:
        raise UsageError(
            f"{where} has format version {format_version}, but this version of"
            f" edje-index reads {' and '.join(_READ_MAJORS)}; upgrade edje-index"
        )
    if value.get("crc32c") != json_checksum(value):
        raise CorruptIndexError(
            f"{where} does not match its checksum, so the file was damaged or edited;"
            " restore the file from a backup"
        )
    try:
        document = _from_json(_Document, value, "index.json")
        manifest = _manifest(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptIndexError(
            f"a member of {where} is missing or has the wrong type ({error!r}); restore"
            " the file from a backup"
        ) from error
    if problem := manifest.counts.problem():
        raise CorruptIndexError(
            f"{where} is damaged: {problem}; restore the file from a backup"
        )
    spec = manifest.spec
    for segment, table in zip(spec.used_segments, manifest.shard_tables, strict=True):
        # each shard has several lines in the table
        if len(spec.segment_shards(segment)) > table.bytes:
            raise CorruptIndexError(
                f"{where} lists {len(spec.segment_shards(segment))} shards, too many"
                f" for a shard table of {table.bytes} bytes; restore the file from a"
                " backup"
            )
    if manifest.counts.inputs != spec.used_rows or document.shards != spec.shards:
        raise CorruptIndexError(
            f"{where} is inconsistent: its numbers of rows ({spec.used_rows}), inputs"
            f" ({manifest.counts.inputs}) and shards ({document.shards}, of"
            f" {spec.shard_size} rows each) do not match; restore the file from a"
            " backup"
        )
    return manifest


def _manifest(document: _Document) -> Manifest:
    """Return the manifest that `document` describes.

    Raises:
        KeyError, TypeError, ValueError: a member is not valid.
    """
    m, d = document.block_shape
    names = tuple(precision.name for precision in document.precisions)
    if not names:
        raise ValueError("precisions is empty")
    number = document.snapshot or 0
    oldest = document.oldest_snapshot
    next_shard = document.next_shard or 0
    if not 0 <= (oldest or 0) <= number or not 0 <= next_shard < _MAX_SHARDS:
        raise ValueError(
            f"the member snapshot ({number}), oldest_snapshot ({oldest}) or next_shard"
            f" ({next_shard}) is out of range"
        )
    deleted = document.deleted
    offset = None
    if document.offset is not None:
        crc = FileEntry.from_json(document.offset).crc32c
        offset = OffsetBlock(crc, tuple(document.offset["precisions"]))
        if not {*offset.precisions} <= {*names}:
            raise ValueError(f"the offset has the precisions {offset.precisions}")
    manifest = Manifest(
        spec=IndexSpec(
            rows=document.rows,
            shard_size=document.shard_size,
            block_shape=(m, d),
            embed_dim=document.embed_dim,
            precisions=names,
            segments=tuple(
                Segment(segment.first_row, segment.rows)
                for segment in document.segments
            ),
            offset=offset,
        ),
        counts=document.counts,
        model=document.model,
        settings=document.settings,
        plan=document.plan,
        shard_table=document.shard_table,
        ann=document.ann,
        created_by=document.created_by,
        format_version=document.format_version,
        encoded_from={
            precision.name: precision.encoded_from
            for precision in document.precisions
            if precision.encoded_from
        },
        snapshot=Snapshot(
            number=number,
            change=document.change or {},
            next_shard=next_shard,
            deleted=None if deleted is None else FileEntry.from_json(deleted),
            deleted_rows=0 if deleted is None else int(deleted["rows"]),
            oldest=oldest,
        ),
        further_tables=tuple(segment.shard_table for segment in document.segments[1:]),
        columns=document.columns,
        row_maps=document.row_maps,
    )
    check_columns(manifest.columns)
    # raises the errors of the entries
    _ = manifest.ann_files
    return manifest


def _from_json(kind: Any, value: Any, name: str) -> Any:
    """Return `value`, parsed JSON, as the type `kind`.

    Args:
        kind: a type of the members of `_Document`. A class with the method `from_json`
            reads itself. Unknown members of a TypedDict are kept.
        name: name of the member for error messages.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: a member is missing or has
            another type.
    """
    if kind is Any:
        return value
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    arguments = get_args(kind)
    origin = get_origin(kind)
    if origin is UnionType:
        # T | None
        return None if value is None else _from_json(arguments[0], value, name)
    if origin in (tuple, list):
        items = _from_json(list, value, name)
        return origin(_from_json(arguments[0], item, name) for item in items)
    if origin is dict:
        return {
            key: _from_json(arguments[1], member, f"{name}.{key}")
            for key, member in value.items()
        }
    if is_typeddict(kind) or is_dataclass(kind):
        types = get_type_hints(kind)
        members = {
            key: _from_json(types.get(key, Any), member, f"{name}.{key}")
            for key, member in value.items()
        }
        if is_typeddict(kind):
            return members
        return kind(**{key: members[key] for key in types.keys() & members})
    if not isinstance(value, int | float if kind is float else kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {shown(value)}")
    return value


def _to_json(value: Any) -> Any:
    """Return a `_Document` or a part of it as JSON values. A member with the default
    value is left out.
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        members = {each.name: getattr(value, each.name) for each in fields(value)}
        return {
            each.name: _to_json(members[each.name])
            for each in fields(value)
            if members[each.name] != each.default
        }
    return list(map(_to_json, value)) if isinstance(value, tuple) else value


def created_by() -> str:
    """Return the package name and version, which a manifest stores as `created_by`."""
    try:
        return f"edje-index {version('edje-index')}"
    except PackageNotFoundError:
        # running from a source tree that is not installed
        return "edje-index"
