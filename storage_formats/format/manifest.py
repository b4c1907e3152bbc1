"""`index.json`, the manifest of an index (SPEC.md section 4)."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict

from storage_formats.arguments import as_count
from storage_formats.atomic import Json, json_bytes
from storage_formats.codecs import check_names
from storage_formats.errors import (
    CorruptIndexError,
    EdjeError,
    IncompleteIndexError,
    RemovedPrecisionError,
    UsageError,
    cannot_read,
)
from storage_formats.format.checksum import json_checksum, with_checksum
from storage_formats.format.file_check import FileEntry, committed_content, data_path
from storage_formats.format.journal import end_erasure
from storage_formats.format.json_values import read_json, write_json
from storage_formats.format.layout import (
    FORMAT,
    FORMAT_VERSION,
    IndexSpec,
    Layout,
)
from storage_formats.format.places import Place, reading_place
from storage_formats.format.shard_table import read_shard_table
from storage_formats.format.source_columns import SourceColumn, check_columns
from storage_formats.format.tombstones import Tombstones, hashes_in
from storage_formats.remote.objects import ObjectFolder, ObjectStoreError
from storage_formats.remote.urls import IndexLocation

# major numbers of the format versions that this package upgrades
_OLD_MAJORS = ("1", "2")
MAX_MANIFEST_BYTES = 64 << 20
REPLACED = b"{}"
"""The contents of `index.json` while a copy replaces the index."""
# The shard table stores shard numbers as int32.
_MAX_SHARDS = 1 << 31
# Row ids of dropped snapshots stay unused. Readers have arrays with an entry for each
# row id, so their number is limited.
_SHARDS_PER_USED_SHARD = 64
_FREE_ROWS = 1 << 28
# most rows of a rows file: this number, or this number per byte of the file
_SMALL_ROWS = 1 << 20
_MAX_ROWS_PER_BYTE = 8


@dataclass(frozen=True)
class Counts:
    """The number of inputs by outcome. `failed` maps each reason to the number of
    inputs that failed for this reason.

    `inputs` is the total: `indexed` + `duplicates` + the sum of all numbers in
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
        """Return an error message if `inputs` is not the sum of the other numbers, and
        None otherwise.
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
    """A state of an index (SPEC.md section 12). The default values describe the state
    after a build.

    Attributes:
        number: number of the snapshot, from 0.
        change: description of the change that wrote the snapshot. It has the members
            `kind` and `created`, and others that depend on the kind. Empty for a build.
        next_shard: lowest shard number that no snapshot has ever used. An append writes
            shards from this number on. The value 0, as after a build, stands for the
            number of shards of the index.
        deleted: entry of the tombstones file. None if no row is deleted.
        deleted_rows: number of deleted rows.
        oldest: number of the oldest kept snapshot. None if it is not stored, as in an
            index that an earlier version of the package wrote.
    """

    number: int = 0
    change: Json = field(default_factory=dict)
    next_shard: int = 0
    deleted: FileEntry | None = None
    deleted_rows: int = 0
    oldest: int | None = field(default=None, compare=False)


class AnnFile(TypedDict, total=False):
    """The entry of a file of the nearest-neighbour index (SPEC.md section 10)."""

    path: str
    bytes: int
    crc32c: str
    vectors: int


class Recall(TypedDict, total=False):
    """The measured recall of a nearest-neighbour index (SPEC.md section 10)."""

    k: int
    value: float
    target: float


class Ann(TypedDict, total=False):
    """The member `ann` of `index.json`, which describes the nearest-neighbour index
    (SPEC.md section 10). An object read from a file may have members that are not
    declared here. They are written back unchanged.
    """

    kind: str
    metric: str
    factory: str
    vectors: int
    rows: int
    probes: int
    candidates: int
    recall: Recall
    files: list[AnnFile]


@dataclass(frozen=True)
class RowsFile:
    """An item of the member `rows_files` of `index.json`: a file with the rows of
    consecutive shards, up to the first shard of the next file (SPEC.md section 9).
    """

    first_shard: int
    file: FileEntry


@dataclass(frozen=True)
class Manifest:
    """The contents of `index.json`. SPEC.md section 4 describes the attributes that are
    not listed here.

    Attributes:
        spec: shape of the index.
        shard_tables: entry of the shard table of each segment.
        encoded_from: for each precision that was converted from another one, the names
            of the precisions that its blocks passed through, first to last.
        snapshot: number and origin of the snapshot, and its deleted rows.
        columns: source columns of the rows table.
        rows_files: the files with the rows, in row order.
        removed: entry of the file with the hashes of removed inputs; None if there are
            none.

    Examples:
        >>> from storage_formats import Manifest
        >>> manifest = Manifest.load("photos.edje")
        >>> manifest.spec.block_shape, manifest.counts.indexed, manifest.counts.failed
        ((4, 16), 6, {})
    """

    spec: IndexSpec
    counts: Counts
    model: Json
    settings: Json
    plan: str
    shard_tables: tuple[FileEntry, ...]
    rows_files: tuple[RowsFile, ...]
    ann: Ann
    created_by: str
    encoded_from: dict[str, tuple[str, ...]] = field(default_factory=dict)
    snapshot: Snapshot = field(default_factory=Snapshot)
    columns: tuple[SourceColumn, ...] = ()
    removed: FileEntry | None = None

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
        return _load(reading_place(root), snapshot)

    @classmethod
    def parse(cls, data: bytes, where: IndexLocation) -> Manifest:
        """Return the manifest in `data`, the bytes of an `index.json`.

        Args:
            where: path or URL of the file, for error messages.

        Raises:
            UsageError, CorruptIndexError: see `load`.
        """
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CorruptIndexError(
                f"cannot read {where}: {error}; restore the file from a backup"
            ) from error
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UsageError(
                f"{where} is not the manifest of an EDJE index; give the path of an"
                " EDJE index"
            )
        format_version = str(value.get("format_version"))
        if is_old_format(value):
            raise UsageError(
                f"{where} has format version {format_version}, which this version of"
                " edje-index can only upgrade; upgrade the index",
                remedy="upgrade",
            )
        if format_version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
            raise UsageError(
                f"{where} has format version {format_version}, but this version of"
                f" edje-index reads {FORMAT_VERSION}; upgrade edje-index"
            )
        if value.get("crc32c") != json_checksum(value):
            raise CorruptIndexError(
                f"{where} does not match its checksum, so the file was damaged or"
                " edited; restore the file from a backup"
            )
        try:
            manifest: Manifest = read_json(
                Manifest, {**value, "spec": value}, "index.json"
            )
            _check_members(manifest)
        except RemovedPrecisionError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, UsageError) as error:
            # `IndexSpec` and `check_names` raise UsageError.
            raise CorruptIndexError(
                f"{where} is damaged: {error!r}; restore the file from a backup"
            ) from error
        return manifest

    def to_json(self) -> Json:
        """Return the members of `index.json`."""
        members = write_json(self)
        value = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            # The members of the shape stand beside the others.
            **members.pop("spec"),
            **members,
        }
        return with_checksum(value)

    def write(self, place: Place) -> None:
        """Replace `index.json`. This commits the snapshot."""
        place.commit(json_bytes(self.to_json()))

    def ann_after_append(self) -> Ann:
        """Return the member `ann` of the index after rows were appended to it."""
        return {"rows": self.spec.rows, **self.ann} if self.ann_files else self.ann

    @property
    def ann_files(self) -> list[FileEntry]:
        """The entries of the files of the nearest-neighbour index."""
        return [FileEntry.from_json(file) for file in self.ann.get("files", [])]

    @property
    def own_files(self) -> list[FileEntry]:
        """The entries of all files that the manifest itself names: shard tables,
        rows files, tombstones, removed inputs, and the files of the nearest-neighbour
        index and of the offset block.
        """
        return [
            *self.shard_tables,
            *(each.file for each in self.rows_files),
            *filter(None, [self.snapshot.deleted, self.removed]),
            *self.ann_files,
            *offset_files(self.spec),
        ]

    def stop_shard(self, position: int) -> int:
        """Return the number of the shard after the last one whose rows are in the file
        at `position` in `rows_files`.
        """
        if position + 1 < len(self.rows_files):
            return self.rows_files[position + 1].first_shard
        return self.spec.shards


@dataclass(frozen=True)
class CommittedIndex:
    """A finished index, opened at one snapshot."""

    place: Place
    manifest: Manifest

    @property
    def root(self) -> Path:
        """Absolute path of the index. For an index on an object store, this is a local
        directory for the files of the snapshot, apart from token files; see `fetch`.
        """
        return self.place.root

    @property
    def remote(self) -> ObjectFolder | None:
        """The objects of the index; None for an index on a file system."""
        return self.place.remote

    @property
    def location(self) -> IndexLocation:
        """URL of the index, or its absolute path."""
        return self.place.location

    @property
    def layout(self) -> Layout:
        """The paths of the files of the index."""
        return self.place

    @property
    def spec(self) -> IndexSpec:
        """Shape of the index."""
        return self.manifest.spec

    @functools.cached_property
    def deleted(self) -> Tombstones:
        """The tombstones of the snapshot, read at the first access."""
        snapshot = self.manifest.snapshot
        if snapshot.deleted is None:
            return Tombstones()
        what = "file of deleted rows"
        with committed_content(self.place, snapshot.deleted, what) as data:
            tombstones = Tombstones.from_bytes(data, self.spec)
            if len(tombstones) != snapshot.deleted_rows:
                raise ValueError(
                    f"it marks {len(tombstones)} rows as deleted, but index.json lists"
                    f" {snapshot.deleted_rows}"
                )
        return tombstones

    @functools.cached_property
    def removed(self) -> frozenset[bytes]:
        """The `input_hash` of each input that users have deleted, and that an update
        must not add again.
        """
        removed = self.manifest.removed
        if removed is None:
            return frozenset()
        with committed_content(self.place, removed, "file of removed inputs") as data:
            return hashes_in(data)

    @classmethod
    def open(
        cls, location: IndexLocation, snapshot: int | None = None
    ) -> CommittedIndex:
        """Open the index at `location`, a directory or a URL, to read it. For the other
        argument and the errors, see `Manifest.load`.
        """
        place = reading_place(location)
        manifest = _load(place, snapshot)
        if "erased" in manifest.snapshot.change:
            end_erasure(place)
        return cls(place.of_snapshot(manifest), manifest)

    @classmethod
    def at(cls, place: Place, snapshot: int | None = None) -> CommittedIndex:
        """Open the index at the place of a writer, like `open`."""
        return cls(place, _load(place, snapshot))

    def reopen(self) -> CommittedIndex:
        """Open the current snapshot of the index.

        Raises:
            UsageError: a different index was written at the same location, so that the
                row ids of this index mean other rows.
            IncompleteIndexError, CorruptIndexError: as for `Manifest.load`.
        """
        current = CommittedIndex.open(self.location)
        # No change of an index changes these values.
        identities = {
            (each.plan, each.spec.shard_size, each.model.get("fingerprint"))
            for each in (self.manifest, current.manifest)
        }
        if len(identities) > 1:
            raise UsageError(
                f"the index at {self.location} was replaced by another index; open the"
                " index again"
            )
        return current

    def undeleted(self) -> CommittedIndex:
        """Return this index without tombstones, so that deleted rows can be read."""
        snapshot = replace(self.manifest.snapshot, deleted=None, deleted_rows=0)
        return replace(self, manifest=replace(self.manifest, snapshot=snapshot))

    def shard_files(self) -> dict[int, dict[str, FileEntry]]:
        """Return the entries of the files of each shard in the shard tables, keyed by
        shard number and path. The entries of a shard that no table lists are empty.

        Raises:
            CorruptIndexError: a shard table is missing or damaged.
        """
        spec = self.spec
        tables = self.manifest.shard_tables
        listed: dict[int, dict[str, FileEntry]] = {}
        self.fetch(tables)
        for segment, table in zip(spec.used_segments, tables, strict=True):
            in_segment = spec.segment_shards(segment)
            for shard, file in read_shard_table(self.place, table):
                if shard in in_segment:
                    listed.setdefault(shard, {})[file.path] = file
        # Only now, because the tables show that the index has so many shards.
        return {shard: listed.get(shard, {}) for shard in spec.shard_numbers()}

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Download the committed files `entries` that `root` lacks. Does nothing for an
        index on a file system.

        Call this before you read one of these files.
        """
        self.place.fetch(entries)


def index_exists(location: IndexLocation) -> bool:
    """Return True if there is a finished index at `location`, a directory or a URL."""
    place = reading_place(location)
    return place.read(place.manifest, MAX_MANIFEST_BYTES) not in (None, REPLACED)


def _load(place: Place, snapshot: int | None) -> Manifest:
    """Read the manifest of the index at `place`. For the other argument and the errors,
    see `Manifest.load`.
    """
    current = _read(place, place.manifest)
    if current is None:
        raise _absent(place)
    number = current.snapshot.number
    if snapshot is None or as_count(snapshot, "snapshot", least=0) == number:
        return current
    earlier = _read(place, place.snapshot(snapshot))
    if earlier is None:
        numbers = [number]
        # A web server lists no files.
        with contextlib.suppress(ObjectStoreError):
            numbers = [*earlier_snapshots(place, current), number]
        kept = ", ".join(map(str, numbers))
        raise UsageError(
            f"{place.location} has no snapshot {snapshot}; choose one of: {kept}",
            parameter="snapshot",
        )
    return earlier


def _read(place: Place, path: Path) -> Manifest | None:
    """Return the contents of a manifest; None if there is none."""
    where = place.address(path)
    try:
        data = place.read(path, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise cannot_read(where, error, "restore the file from a backup") from error
    if data is None or data == REPLACED:
        return None
    return Manifest.parse(data, where)


def _absent(place: Place) -> EdjeError:
    """Return the exception to raise if there is no `index.json` at `place`."""
    if place.is_changing():
        return IncompleteIndexError(
            f"the index at {place.location} is unfinished; if no process is writing it,"
            " run the same command again to finish it, or delete it"
        )
    if place.remote is None and place.root.exists():
        return UsageError(
            f"{place.location} is not an EDJE index (it has no index.json)",
            remedy="show",
        )
    return UsageError(f"there is no index at {place.location}", remedy="build")


def offset_files(spec: IndexSpec) -> list[FileEntry]:
    """Return the entry of the file with the values of the offset block. The list is
    empty if the index has no offset block.
    """
    if spec.offset is None:
        return []
    layout = Layout(Path())
    m, d = spec.block_shape
    path = layout.relative(layout.offset_values)
    return [FileEntry(path, 4 * m * d, spec.offset.crc32c)]


def named_files(
    index: CommittedIndex, manifests: Iterable[Manifest] | None = None
) -> Iterator[FileEntry]:
    """Yield the entries of all files that the snapshot of `index` names, apart from
    `index.json` and each `zarr.json`. A file in a data directory that no kept snapshot
    names is garbage.

    Args:
        manifests: manifests of the snapshots of the index whose files are yielded
            instead. A shard table that several of them name is read once, but a file
            that several tables list is yielded several times.

    Raises:
        CorruptIndexError: a shard table is missing or damaged.
    """
    manifests = [index.manifest] if manifests is None else list(manifests)
    tables = {table for each in manifests for table in each.shard_tables}
    yield from {file for each in manifests for file in each.own_files}
    index.fetch(tables)
    for table in tables:
        yield from (file for _, file in read_shard_table(index.place, table))


def kept_snapshots(index: CommittedIndex) -> list[Manifest]:
    """Return the manifests of all kept snapshots, oldest first. The last manifest is
    that of `index`.

    Raises:
        UsageError, CorruptIndexError: a snapshot cannot be read, see `Manifest.load`.
    """
    place = index.place
    numbers = earlier_snapshots(place, index.manifest)
    # A change may remove a snapshot after `earlier_snapshots` listed it.
    earlier = filter(None, [_read(place, place.snapshot(each)) for each in numbers])
    return [*earlier, index.manifest]


def earlier_snapshots(place: Place, current: Manifest) -> list[int]:
    """Return the numbers of the kept snapshots before `current`, ascending."""
    numbers = [
        int(path.stem)
        for path in place.names(place.snapshots)
        if path.suffix == ".json" and path.stem.isdecimal()
    ]
    return sorted(
        number
        for number in numbers
        if (current.snapshot.oldest or 0) <= number < current.snapshot.number
    )


def is_old_format(value: Any) -> bool:
    """Return True if `value`, the parsed JSON of an `index.json`, is in a format that
    `storage_formats.upgrade` upgrades.
    """
    is_manifest = isinstance(value, dict) and value.get("format") == FORMAT
    return is_manifest and str(value.get("format_version")).split(".")[0] in _OLD_MAJORS


def _check_members(manifest: Manifest) -> None:
    """Check the values of members whose types were checked.

    Raises:
        KeyError, TypeError, ValueError, UsageError: the value of a member is not valid.
    """
    spec = manifest.spec
    snapshot = manifest.snapshot
    offset = () if spec.offset is None else spec.offset.precisions
    if (
        (snapshot.oldest or 0) > snapshot.number
        or snapshot.next_shard >= _MAX_SHARDS
        or spec.shards
        > _SHARDS_PER_USED_SHARD * spec.used_shards + _FREE_ROWS // spec.shard_size
        or not spec.precisions
        or not {*offset} <= {*spec.precisions}
        or manifest.counts.inputs != spec.used_rows
    ):
        raise ValueError(
            f"snapshot ({snapshot.number}), oldest ({snapshot.oldest}), next_shard"
            f" ({snapshot.next_shard}), precisions ({spec.precisions}), offset"
            f" ({offset}) or the number of inputs ({manifest.counts.inputs} for"
            f" {spec.used_rows} rows) is out of range"
        )
    if problem := manifest.counts.problem():
        raise ValueError(problem)
    for segment, table in zip(spec.used_segments, manifest.shard_tables, strict=True):
        # A shard has several lines in the table, so a table cannot list more shards
        # than it has bytes. A segment with more shards is refused here, before memory
        # is allocated for them.
        if len(spec.segment_shards(segment)) > table.bytes:
            raise ValueError(f"{table.path} is too short for its shards")
    check_names(spec.precisions)
    check_columns(manifest.columns)
    for file in manifest.own_files:
        data_path(file.path)
    # The rows files must hold the rows of all shards, in ascending order, and be long
    # enough for their rows.
    before = -1
    first_row = spec.used_segments[0].first_row
    for position, each in enumerate(manifest.rows_files):
        first = each.first_shard
        is_first = first * spec.shard_size == first_row or position > 0
        ranges = spec.used_ranges(first, manifest.stop_shard(position))
        if not (is_first and before < first < spec.shards and ranges):
            raise ValueError(f"the rows files do not ascend at shard {first}")
        rows = sum(map(len, ranges))
        if rows > max(_SMALL_ROWS, _MAX_ROWS_PER_BYTE * each.file.bytes):
            raise ValueError(f"{each.file.path} is too short for {rows} rows")
        before = first
    if not manifest.rows_files:
        raise ValueError("there is no rows file")


def created_by() -> str:
    """Return the package name and version, which a manifest stores as `created_by`."""
    try:
        return f"edje-index {version('edje-index')}"
    except PackageNotFoundError:
        # The code runs from a source tree that is not installed.
        return "edje-index"
