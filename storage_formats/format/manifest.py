"""`index.json`, the manifest of an index (SPEC.md section 4)."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from storage_formats.arguments import as_count, as_path
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
    IndexSpec,
    Layout,
    Segment,
)
from storage_formats.format.shard_table import FileEntry, read_shard_table
from storage_formats.format.source_columns import SourceColumn, columns_from_json
from storage_formats.format.tombstones import Tombstones, read_tombstones
from storage_formats.remote.objects import ObjectFolder
from storage_formats.remote.urls import IndexLocation

MAX_MANIFEST_BYTES = 64 << 20
SNAPSHOT_FILE = re.compile(r"snapshots/\d+\.json")
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

    def to_json(self) -> dict[str, Any]:
        """Return the members of `index.json` that describe the snapshot."""
        if not self.number and not self.change:
            return {}
        value: dict[str, Any] = {
            "snapshot": self.number,
            "change": self.change,
            "next_shard": self.next_shard,
        }
        if self.oldest is not None:
            value["oldest_snapshot"] = self.oldest
        if self.deleted is None:
            return value
        return {
            **value,
            "deleted": {**self.deleted.to_json(), "rows": self.deleted_rows},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Snapshot:
        """Return the snapshot described by the members `value` of an `index.json`.

        Raises:
            KeyError, TypeError, ValueError: a member is missing or not valid.
        """
        deleted = value.get("deleted")
        snapshot = cls(
            number=int(value.get("snapshot", 0)),
            change=dict(value.get("change", {})),
            next_shard=int(value.get("next_shard", 0)),
            deleted=None if deleted is None else FileEntry.from_json(deleted),
            deleted_rows=0 if deleted is None else int(deleted["rows"]),
            oldest=(
                int(value["oldest_snapshot"]) if "oldest_snapshot" in value else None
            ),
        )
        number = snapshot.number
        oldest = snapshot.oldest
        if (
            not 0 <= (oldest or 0) <= number
            or not 0 <= snapshot.next_shard < _MAX_SHARDS
        ):
            raise ValueError(
                f"the member snapshot ({number}), oldest_snapshot ({oldest}) or"
                f" next_shard ({snapshot.next_shard}) is out of range"
            )
        return snapshot


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
    ann: dict[str, Any]
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
        precisions = list[dict[str, Any]]()
        for name in spec.precisions:
            precisions.append(
                {
                    "name": name,
                    "record_bytes": codec(name, spec.block_shape).record_bytes,
                }
            )
            if sources := self.encoded_from.get(name):
                precisions[-1]["encoded_from"] = list(sources)
        value = {
            "format": FORMAT,
            "format_version": self.format_version,
            "created_by": self.created_by,
            "rows": spec.rows,
            "shard_size": spec.shard_size,
            "shards": spec.shards,
            "block_shape": list(spec.block_shape),
            "embed_dim": spec.embed_dim,
            "precisions": precisions,
            "counts": asdict(self.counts),
            "model": self.model,
            "settings": self.settings,
            "plan": self.plan,
            "shard_table": self.shard_table.to_json(),
            "ann": self.ann,
            **self.snapshot.to_json(),
        }
        if self.row_maps:
            value["row_maps"] = [row_map.to_json() for row_map in self.row_maps]
        if spec.segments:
            pairs = zip(spec.used_segments, self.shard_tables, strict=True)
            value["segments"] = [
                {**asdict(segment), "shard_table": table.to_json()}
                for segment, table in pairs
            ]
        if self.columns:
            value["columns"] = [column.to_json() for column in self.columns]
        write_json_atomic(layout.manifest, {**value, "crc32c": json_checksum(value)})

    @property
    def ann_files(self) -> list[FileEntry]:
        """The file entries of the nearest-neighbour index."""
        return [FileEntry.from_json(value) for value in self.ann.get("files", [])]

    @property
    def own_files(self) -> list[FileEntry]:
        """The file entries of all files that no shard table lists."""
        deleted = [] if self.snapshot.deleted is None else [self.snapshot.deleted]
        return [
            *self.shard_tables,
            *deleted,
            *(row_map.file for row_map in self.row_maps),
            *self.ann_files,
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
    if format_version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise UsageError(
            f"{where} has format version {format_version}, but this version of"
            f" edje-index reads {FORMAT_VERSION}; upgrade edje-index"
        )
    if value.get("crc32c") != json_checksum(value):
        raise CorruptIndexError(
            f"{where} does not match its checksum, so the file was damaged or edited;"
            " restore the file from a backup"
        )
    try:
        manifest = _from_members(value)
        shards = int(value["shards"])
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
    if manifest.counts.inputs != spec.used_rows or shards != spec.shards:
        raise CorruptIndexError(
            f"{where} is inconsistent: its numbers of rows ({spec.used_rows}), inputs"
            f" ({manifest.counts.inputs}) and shards ({shards}, of {spec.shard_size}"
            " rows each) do not match; restore the file from a backup"
        )
    return manifest


def _from_members(value: dict[str, Any]) -> Manifest:
    m, d = value["block_shape"]
    counts = value["counts"]
    if not value["precisions"]:
        raise ValueError("precisions is empty")
    segments = [
        (
            Segment(int(each["first_row"]), int(each["rows"])),
            FileEntry.from_json(each["shard_table"]),
        )
        for each in value.get("segments", [])
    ]
    spec = IndexSpec(
        rows=int(value["rows"]),
        shard_size=int(value["shard_size"]),
        block_shape=(int(m), int(d)),
        embed_dim=int(value["embed_dim"]),
        precisions=tuple(str(precision["name"]) for precision in value["precisions"]),
        segments=tuple(segment for segment, _ in segments),
    )
    return Manifest(
        spec=spec,
        counts=Counts(
            int(counts["inputs"]),
            int(counts["indexed"]),
            int(counts["duplicates"]),
            {str(reason): int(count) for reason, count in counts["failed"].items()},
        ),
        model=dict(value["model"]),
        settings=dict(value["settings"]),
        plan=str(value["plan"]),
        shard_table=FileEntry.from_json(value["shard_table"]),
        ann=_checked_ann(value["ann"]),
        created_by=str(value["created_by"]),
        format_version=str(value["format_version"]),
        encoded_from={
            str(precision["name"]): tuple(
                str(source) for source in precision["encoded_from"]
            )
            for precision in value["precisions"]
            if "encoded_from" in precision
        },
        snapshot=Snapshot.from_json(value),
        further_tables=tuple(table for _, table in segments[1:]),
        columns=columns_from_json(value.get("columns", [])),
        row_maps=tuple(map(RowMap.from_json, value.get("row_maps", []))),
    )


def _checked_ann(value: dict[str, Any]) -> dict[str, Any]:
    for file in value.get("files", []):
        FileEntry.from_json(file)
    recall = value.get("recall", {"value": 1.0})
    numbers = [
        value.get("vectors", 0),
        value.get("probes", 1),
        recall["value"],
        recall.get("target", 1.0),
    ]
    numbers += [
        file.get(name, 0)
        for file in value.get("files", [])
        for name in ("vectors", "similarity")
    ]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError(
            f"a member of ann that must be a number is not a number: {numbers}"
        )
    if not isinstance(value.get("factory", ""), str):
        raise TypeError(
            f"the member factory of ann is not a string: {value['factory']!r}"
        )
    return dict(value)


def created_by() -> str:
    """Return the package name and version, which a manifest stores as `created_by`."""
    try:
        return f"edje-index {version('edje-index')}"
    except PackageNotFoundError:
        # running from a source tree that is not installed
        return "edje-index"
