"""Changes to a finished index (SPEC.md section 12). Each change commits a new snapshot.

The caller must hold the lock of the index.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from storage_formats.atomic import fsync_path, make_directories, write_bytes_atomic, write_json_atomic
from storage_formats.codecs import precisions
from storage_formats.errors import RowIdError, UsageError
from storage_formats.format.checksum import crc32c
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import EXTENDED_VERSION, SNAPSHOT_VERSION, IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest, RowMap, Snapshot, created_by, earlier_snapshots
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.row_map import write_row_map
from storage_formats.format.shard_table import FileEntry, read_shard_table, write_shard_table
from storage_formats.format.tombstones import Tombstones, refuse_before_first, rows_in_use
from storage_formats.format.zarr_metadata import zarr_documents
from storage_formats.presence import check_files
from storage_formats.row_ids import RowIds, check_row_ids
from storage_formats.writing.begin import remove_unfinished
from storage_formats.writing.publish import check_receipts, remove_build, total_counts
from storage_formats.writing.row_copy import RowCopy, count_values

_NAMES = "|".join(precisions())
_PRECISION_FOLDER = re.compile(rf"(tokens|checksums)/({_NAMES})")
DATA_FILE = re.compile(
    rf"tokens/({_NAMES})/(c\.\d+(\.0)+|zarr\.json)|checksums/({_NAMES})/\d+\.crc32c|embeddings/c\.\d+\.0|rows/\d+\.parquet"
    r"|manifest/shards-\w+\.parquet|manifest/deleted-\w+\.bin|manifest/row-map-\w+\.parquet|ann/index(-\w+)?\.faiss"
)


def commit_snapshot(index: CommittedIndex, changed: Manifest, change: dict[str, Any]) -> Manifest:
    """Commit `changed` as the next snapshot, and return the new manifest. The snapshot of `index` is kept.

    Args:
        index: the index before the change.
        changed: manifest after the change. All files in this manifest must be on disk.
        change: value of `change` in `index.json`, with the member `kind`.
    """
    layout, current = Layout(index.root), index.manifest
    snapshot = Snapshot(
        number=current.snapshot.number + 1,
        change={**change, "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")},
        next_shard=max(current.snapshot.next_shard, current.spec.shards, changed.spec.shards),
        deleted=changed.snapshot.deleted,
        deleted_rows=changed.snapshot.deleted_rows,
    )
    format_version = EXTENDED_VERSION if changed.columns or changed.row_maps else SNAPSHOT_VERSION
    manifest = replace(changed, snapshot=snapshot, format_version=format_version, created_by=created_by())
    kept = layout.snapshot(current.snapshot.number)
    make_directories(kept.parent)
    write_bytes_atomic(kept, read_index_file(layout.root, layout.manifest))
    if changed.spec.rows > current.spec.rows:
        write_array_shapes(layout, changed.spec)
    manifest.write(layout)
    write_array_shapes(layout, changed.spec)
    return manifest


def write_array_shapes(layout: Layout, spec: IndexSpec) -> None:
    """Rewrite each `zarr.json` that does not match an index of shape `spec`."""
    for path, document in zarr_documents(layout, spec).items():
        try:
            is_current = json.loads(path.read_bytes()) == document
        except (OSError, ValueError):
            is_current = False
        if not is_current:
            write_json_atomic(path, document)


@dataclass(frozen=True)
class Deletion:
    """The plan of a deletion.

    Attributes:
        row_ids: int64 [k], all requested row ids, ascending.
        new: int64 [n], requested row ids that are not deleted yet, ascending.
    """

    row_ids: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def already_deleted(self) -> int:
        """Number of requested rows that were deleted before."""
        return len(self.row_ids) - len(self.new)


def plan_deletion(index: CommittedIndex, row_ids: RowIds) -> Deletion:
    """Plan the deletion of `row_ids`: find the rows that are not deleted yet.

    Raises:
        RowIdError: a row id is out of range or belongs to no input.
    """
    ids = np.unique(check_row_ids(row_ids, index.manifest.spec.rows))
    refuse_before_first(ids, index.manifest.spec)
    if len(unused := ids[~rows_in_use(ids, index.manifest.spec)]):
        raise RowIdError(f"row id {unused[0]} belongs to no input; leave this row id out")
    is_deleted = index.deleted.contain(ids)
    return Deletion(tuple(ids.tolist()), tuple(ids[~is_deleted].tolist()))


def commit_deletion(index: CommittedIndex, deletion: Deletion) -> Manifest:
    """Mark the rows `deletion.new` as deleted in a new snapshot. Return the new manifest. The data remains on disk."""
    changed = with_deleted_rows(index, index.manifest, deletion.new)
    return commit_snapshot(index, changed, {"kind": "delete", "rows": len(deletion.new)})


def with_deleted_rows(index: CommittedIndex, changed: Manifest, row_ids: RowIds) -> Manifest:
    """Write tombstones for the deleted rows of `index` and for `row_ids`. Return `changed` with these tombstones.

    Args:
        index: the index before the change.
        changed: manifest after the change, without the new tombstones.
        row_ids: row ids to delete.
    """
    tombstones = index.deleted.with_rows(np.asarray(row_ids, dtype=np.int64))
    entry = write_tombstones(Layout(index.root), tombstones)
    return replace(changed, snapshot=replace(changed.snapshot, deleted=entry, deleted_rows=len(tombstones)))


def commit_compaction(
    index: CommittedIndex, copy: RowCopy, shards: Sequence[ShardReceipt], ann: dict[str, Any]
) -> Manifest:
    """Commit a snapshot that contains only the copied rows, and write a row map. Return the manifest.

    Args:
        index: the index before the compaction.
        copy: the rows that were copied.
        shards: receipts of all shards of the copy.
        ann: value of `ann` in `index.json`, which describes a nearest-neighbour index of the copied rows.
    """
    check_receipts(shards, copy.shards)
    layout, manifest, first_row = Layout(index.root), index.manifest, copy.segment.first_row
    table = write_shard_table(layout, ((receipt.shard, file) for receipt in shards for file in receipt.files))
    row_map = write_row_map(layout, ((row_ids, first_row + ranks) for row_ids, ranks in copy.selection.by_shard()))
    changed = replace(
        manifest,
        spec=copy.spec,
        counts=total_counts(shards),
        shard_table=table,
        further_tables=(),
        ann=ann,
        snapshot=replace(manifest.snapshot, deleted=None, deleted_rows=0),
        row_maps=(*manifest.row_maps, RowMap(row_map, first_row)),
        columns=count_values(layout, copy.shards, manifest.columns),
    )
    removed = manifest.counts.inputs - copy.segment.rows
    return commit_snapshot(
        index, changed, {"kind": "compact", "first_row": first_row, "rows": copy.segment.rows, "removed": removed}
    )


def write_tombstones(layout: Layout, tombstones: Tombstones) -> FileEntry:
    """Write a tombstones file, and return the file entry."""
    data = tombstones.to_bytes()
    path = layout.tombstones(crc32c(data))
    write_bytes_atomic(path, data)
    return FileEntry(layout.relative(path), len(data), crc32c(data))


def roll_back(index: CommittedIndex, number: int) -> Manifest:
    """Commit a new snapshot with the contents of the earlier snapshot `number`, and return the new manifest.

    Raises:
        UsageError: snapshot `number` does not exist, or is the current snapshot.
        CorruptIndexError: a file of snapshot `number` is missing.
    """
    if number == index.manifest.snapshot.number:
        raise UsageError(f"snapshot {number} is the current snapshot; choose an earlier snapshot", parameter="snapshot")
    earlier = CommittedIndex.open(index.root, number)
    check_files(earlier)
    return commit_snapshot(index, earlier.manifest, {"kind": "rollback", "to": number})


def kept_snapshots(index: CommittedIndex) -> list[Manifest]:
    """Return the manifests of all snapshots on disk, oldest first. The last manifest is the current one."""
    numbers = earlier_snapshots(Layout(index.root), index.manifest)
    return [*(Manifest.load(index.root, number) for number in numbers), index.manifest]


@dataclass(frozen=True)
class Removal:
    """The result of `remove_snapshots`.

    Attributes:
        snapshots: numbers of the removed snapshots.
        files: number of removed data files.
        bytes: total length of the removed data files in bytes.
    """

    snapshots: tuple[int, ...]
    files: int
    bytes: int


def remove_snapshots(index: CommittedIndex, keep: int | None = None) -> Removal:
    """Remove all snapshots except the newest `keep`, and all files that only the removed snapshots need.

    The current snapshot is one of the newest `keep`. None keeps all snapshots. Files of unfinished changes are removed
    too.

    Raises:
        UsageError: `keep` is less than 1.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"keep must be at least 1, got {keep}; the current snapshot is always kept", parameter="keep")
    layout = Layout(index.root)
    numbers = earlier_snapshots(layout, index.manifest)
    removed = [] if keep is None else numbers[: max(0, len(numbers) + 1 - keep)]
    for number in removed:
        layout.snapshot(number).unlink(missing_ok=True)
    if removed:
        fsync_path(layout.snapshot(0).parent)
    remove_unfinished(layout)
    remove_build(layout)
    sizes = remove_unnamed_files(layout, kept_snapshots(index), tables=True)
    write_array_shapes(layout, index.manifest.spec)
    return Removal(tuple(removed), len(sizes), sum(sizes))


def remove_unnamed_files(layout: Layout, manifests: Sequence[Manifest], *, tables: bool = False) -> list[int]:
    """Remove the data files that are in none of `manifests`. Return the length of each removed file in bytes.

    Args:
        layout: layout of the index.
        manifests: manifests of the snapshots to keep.
        tables: whether to remove shard tables too. Readers that opened the index before a conversion need the old shard
            tables.
    """
    named = named_files(layout, manifests)
    if not tables:
        named |= {layout.relative(path) for path in layout.shard_table(0).parent.glob("shards-*.parquet")}
    sizes = []
    for path in (path for folder in layout.data_folders() for path in sorted(folder.rglob("*"), reverse=True)):
        where = layout.relative(path)
        if DATA_FILE.fullmatch(where) and where not in named:
            sizes.append(path.lstat().st_size)
            path.unlink()
        elif _PRECISION_FOLDER.fullmatch(where):
            with contextlib.suppress(OSError):  # it holds files
                path.rmdir()
    return sizes


def named_files(layout: Layout, manifests: Iterable[Manifest]) -> set[str]:
    """Return the relative paths of all data files in `manifests`."""
    names: set[str] = set()
    tables: set[FileEntry] = set()
    for manifest in manifests:
        names |= {layout.relative(path) for path in layout.zarr_files(manifest.spec.precisions)}
        names |= {file.path for file in manifest.ann_files}
        names |= {row_map.file.path for row_map in manifest.row_maps}
        tables |= set(manifest.shard_tables)
        if manifest.snapshot.deleted is not None:
            names.add(manifest.snapshot.deleted.path)
    for table in tables:
        names.add(table.path)
        names |= {file.path for _, file in read_shard_table(layout.root, table)}
    return names
