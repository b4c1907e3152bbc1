"""Jobs on snapshots: delete rows, list snapshots, roll back, and remove old snapshots."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.jobs.lock import locked_index
from storage_formats.errors import UsageError
from storage_formats.row_ids import check_row_ids

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex, Manifest
    from storage_formats.format.object_store import IndexLocation
    from storage_formats.writing.snapshots import Removal


@dataclass(frozen=True)
class DeleteResult:
    """The result of a deletion.

    Attributes:
        deleted: ids of the rows that were deleted (or would be deleted, if `dry_run` is True), ascending.
        already_deleted: number of selected rows that were already deleted.
        left: number of rows that remain (or would remain, if `dry_run` is True).
        snapshot: number of the current snapshot.
        dry_run: True if the deletion was only tried and nothing was changed.
        erased: number of rows whose data was overwritten.

    Example:
        >>> from pipelines import delete_rows
        >>> result = delete_rows("photos.edje", uri="*/[01].jpg", dry_run=True)
        >>> result.deleted, result.left, result.snapshot
        ((0, 1), 4, 0)
    """

    deleted: tuple[int, ...]
    already_deleted: int
    left: int
    snapshot: int
    dry_run: bool
    erased: int = 0


def run_delete(
    location: IndexLocation, rows: Sequence[int], uri: str | None, *, where: str | None = None, dry_run: bool = False
) -> DeleteResult:
    """Delete rows of the index at `location`, and commit a snapshot.

    Delete the rows with the ids `rows`, the rows whose uri matches the shell pattern `uri`, and the rows that pass the
    filter `where`.

    Raises:
        UsageError: there is no index at `location`, `where` is invalid, or no rows are selected because `rows`, `uri`
            and `where` are all missing.
        RowIdError: a row id does not exist.
        EdjeError: another process is changing the index.
        OSError: the index cannot be written.
    """
    from storage_formats.writing.working_copy import working_copy

    if not len(rows) and uri is None and where is None:
        raise UsageError("no rows are selected; give row ids, a uri pattern or a filter", parameter="rows")
    with working_copy(location, read_only=dry_run) as copy:
        return _delete(copy.root, rows, uri, where, dry_run=dry_run)


def _delete(root: Path, rows: Sequence[int], uri: str | None, where: str | None, *, dry_run: bool) -> DeleteResult:
    from edje_index.search.row_filters import RowFilters
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.snapshots import commit_deletion, plan_deletion

    CommittedIndex.open(root)  # fails before the lock makes a directory
    with contextlib.nullcontext() if dry_run else locked_index(root):
        index = CommittedIndex.open(root)
        matching = [] if uri is None else rows_of_uris(index, uri).tolist()
        passing = [] if where is None else RowFilters(index).row_ids(where).tolist()
        row_ids = check_row_ids(rows, index.manifest.spec.rows)
        deletion = plan_deletion(index, np.array([*row_ids, *matching, *passing], dtype=np.int64))
        manifest = index.manifest
        if deletion.new and not dry_run:
            manifest = commit_deletion(index, deletion)
        left = index.manifest.counts.inputs - index.manifest.snapshot.deleted_rows - len(deletion.new)
        return DeleteResult(deletion.new, deletion.already_deleted, left, manifest.snapshot.number, dry_run)


def rows_of_uris(index: CommittedIndex, pattern: str) -> NDArray[np.int64]:
    """Return the ids of the rows whose uri matches a shell pattern, int64 [n]. A `*` also matches slashes."""
    from storage_formats.format.rows import iter_rows

    matches = re.compile(fnmatch.translate(pattern)).match
    rows = (row for table in iter_rows(index, ["row_id", "uri"]) for row in table.to_pylist())
    return np.array([row["row_id"] for row in rows if matches(row["uri"])], dtype=np.int64)


@dataclass(frozen=True)
class SnapshotEntry:
    """A snapshot of an index.

    Attributes:
        snapshot: number of the snapshot.
        kind: kind of the change that made the snapshot, for example "build", "append" or "delete".
        created: time of the commit in UTC; None for a build.
        rows: number of rows that are not deleted.
        deleted: number of deleted rows.
        precisions: precisions that the snapshot contains.
        change: details of the change by name, for example the number of deleted rows.
    """

    snapshot: int
    kind: str
    created: str | None
    rows: int
    deleted: int
    precisions: tuple[str, ...]
    change: dict[str, Any]


def history(location: IndexLocation) -> list[SnapshotEntry]:
    """Return the snapshots of the index at `location`, oldest first.

    Raises:
        UsageError: there is no index at `location`.
        IncompleteIndexError: the index is not finished.
        CorruptIndexError: the index is damaged.
    """
    from storage_formats.format.layout import Layout
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.mirror import download_snapshots
    from storage_formats.writing.snapshots import kept_snapshots
    from storage_formats.writing.working_copy import working_copy

    with working_copy(location, read_only=True) as copy:
        if copy.remote is not None:
            download_snapshots(copy.remote, Layout(copy.root))
        return [_entry(manifest) for manifest in kept_snapshots(CommittedIndex.open(copy.root))]


def _entry(manifest: Manifest) -> SnapshotEntry:
    snapshot = manifest.snapshot
    return SnapshotEntry(
        snapshot=snapshot.number,
        kind=str(snapshot.change.get("kind", "build")),
        created=snapshot.change.get("created"),
        rows=manifest.counts.inputs - snapshot.deleted_rows,
        deleted=snapshot.deleted_rows,
        precisions=manifest.spec.precisions,
        change={name: value for name, value in snapshot.change.items() if name not in ("kind", "created")},
    )


def run_rollback(location: IndexLocation, snapshot: int) -> SnapshotEntry:
    """Commit a new snapshot with the contents of the earlier snapshot `snapshot`.

    Raises:
        UsageError: there is no index at `location`, or `snapshot` does not exist or is the current snapshot.
        CorruptIndexError: a file of the snapshot is missing.
        EdjeError: another process is changing the index.
        OSError: the index cannot be written.
    """
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.snapshots import roll_back
    from storage_formats.writing.working_copy import working_copy

    with working_copy(location) as copy:
        CommittedIndex.open(copy.root)  # fails before the lock makes a directory
        with locked_index(copy.root):
            return _entry(roll_back(CommittedIndex.open(copy.root), snapshot))


def run_gc(location: IndexLocation, keep: int | None) -> Removal:
    """Remove old snapshots, unfinished changes, and files that no snapshot needs.

    The newest `keep` snapshots are kept. If `keep` is None, all snapshots are kept.

    Raises:
        UsageError: there is no index at `location`, or `keep` is less than 1.
        EdjeError: another process is changing the index.
        OSError: a file cannot be removed.
    """
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.snapshots import remove_snapshots
    from storage_formats.writing.working_copy import working_copy

    with working_copy(location) as copy:
        CommittedIndex.open(copy.root)  # fails before the lock makes a directory
        with locked_index(copy.root):
            removal = remove_snapshots(CommittedIndex.open(copy.root), keep)
            if copy.remote is None:
                return removal
            sizes = copy.remove_unnamed_objects(tables=True)
            return replace(removal, files=len(sizes), bytes=sum(sizes))
