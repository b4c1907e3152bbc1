"""The erase job: deletes rows, and overwrites their data in every file of the index."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipelines.jobs.leftovers import refuse_unfinished_append
from pipelines.jobs.lock import locked_index
from pipelines.jobs.snapshots import DeleteResult
from storage_formats.errors import UsageError
from storage_formats.format.object_store import IndexLocation, is_url
from storage_formats.row_ids import check_row_ids

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.erase import Erasure


def run_erase(
    location: IndexLocation, rows: Sequence[int], uri: str | None, *, where: str | None = None, dry_run: bool = False
) -> DeleteResult:
    """Delete and erase the rows that `run_delete` would delete, and the duplicates of these rows.

    Selected rows that are already deleted are erased too. An interrupted erasure is finished first, even if no rows are
    selected; its rows are part of the result. If there are rows to erase, or an earlier snapshot contains a row that
    `uri` or `where` selects, all earlier snapshots and the files of stopped compactions and conversions are removed.

    Raises:
        UsageError: there is no index at `location`, `location` is a URL, or `where` is invalid.
        RowIdError: a row id does not exist.
        CorruptIndexError: a file with the rows is missing or damaged.
        MissingExtraError: the index has a nearest-neighbour index and FAISS is not installed.
        EdjeError: another process is changing the index, or an append, update or retry has not finished.
        OSError: the index cannot be written.
    """
    from edje_index.indexing.faiss_index import check_faiss
    from storage_formats.format.manifest import CommittedIndex

    if is_url(location):
        raise UsageError(
            f"rows of {location} cannot be erased on the object store; copy the index to a directory, erase the rows "
            "there, and copy the directory back in place of the index",
            parameter="erase",
        )
    root = Path(location)
    if CommittedIndex.open(root).manifest.ann.get("files"):
        check_faiss()
    with contextlib.nullcontext() if dry_run else locked_index(root, erasing=True):
        return _erase(CommittedIndex.open(root), rows, uri, where, dry_run=dry_run)


def _erase(
    index: CommittedIndex, rows: Sequence[int], uri: str | None, where: str | None, *, dry_run: bool
) -> DeleteResult:
    from storage_formats.writing.erase import plan_erasure, read_erasure, store_erasure
    from storage_formats.writing.snapshots import plan_deletion

    stopped = read_erasure(index)
    if stopped is None:
        refuse_unfinished_append(index, dry_run=dry_run)  # its files may contain the rows
    removed = _rows_of_earlier_snapshots(index, uri, where)
    stopped_rows = np.array(() if stopped is None else stopped.rows, dtype=np.int64)
    deleted = plan_deletion(index, stopped_rows).new
    if stopped is not None and not dry_run:
        index = _finish(index, stopped)
    deletion = plan_deletion(index, np.concatenate([_requested(index, rows, uri, where), stopped_rows]))
    erasure = plan_erasure(index, deletion.row_ids)
    left = index.manifest.counts.inputs - index.manifest.snapshot.deleted_rows - len(deletion.new)
    if (erasure.rows or removed) and not dry_run:
        store_erasure(index, erasure)
        index = _finish(index, erasure)
    deleted = tuple(sorted({*deleted, *deletion.new}))
    return DeleteResult(
        deleted=deleted,
        already_deleted=len(deletion.row_ids) - len(deleted),
        left=left,
        snapshot=index.manifest.snapshot.number,
        dry_run=dry_run,
        erased=len({*stopped_rows.tolist(), *erasure.rows}) + len(removed),
    )


def _requested(index: CommittedIndex, rows: Sequence[int], uri: str | None, where: str | None) -> NDArray[np.int64]:
    from storage_formats.writing.erase import duplicates_of

    matching = [] if uri is None else _stored_rows_of_uris(index, uri)
    passing = [] if where is None else _stored_rows_that_pass(index, where)
    requested = [*check_row_ids(rows, index.manifest.spec.rows).tolist(), *matching, *passing]
    return np.array([*requested, *duplicates_of(index, requested)], dtype=np.int64)


def _rows_of_earlier_snapshots(index: CommittedIndex, uri: str | None, where: str | None) -> set[int]:
    """Return the selected rows whose data only earlier snapshots hold, for example after a compaction or a rollback."""
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.snapshots import kept_snapshots

    current = {segment.first_row for segment in index.manifest.spec.used_segments}  # no two segments begin at one row
    selected: set[int] = set()
    for manifest in kept_snapshots(index)[:-1]:
        segments = [each for each in manifest.spec.used_segments if each.first_row not in current]
        if segments:
            earlier = CommittedIndex(index.root, manifest)
            row_ids = _requested(earlier, [], uri, None).tolist()
            with contextlib.suppress(UsageError):  # the snapshot has no such column
                row_ids += _requested(earlier, [], None, where).tolist()
            selected.update(row for row in row_ids for each in segments if each.first_row <= row < each.stop)
    return selected


def _finish(index: CommittedIndex, erasure: Erasure) -> CommittedIndex:
    """Delete the rows of `erasure`, remove earlier snapshots, and overwrite the data of the rows. Return the index."""
    from edje_index.indexing.faiss_index import ann_without_rows
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.erase import erase_rows
    from storage_formats.writing.snapshots import commit_deletion, plan_deletion, remove_snapshots

    deletion = plan_deletion(index, np.array(erasure.rows, dtype=np.int64))
    if deletion.new:
        index = CommittedIndex(index.root, commit_deletion(index, deletion))
    remove_snapshots(index, keep=1)
    return CommittedIndex(index.root, erase_rows(index, erasure, ann_without_rows(index, erasure.rows)))


def _stored_rows_of_uris(index: CommittedIndex, pattern: str) -> list[int]:
    """Return the ids of all rows whose uri matches a shell pattern, including deleted rows."""
    from storage_formats.format.rows import ERASED, iter_stored_rows

    matches = re.compile(fnmatch.translate(pattern)).match
    rows = (row for table in iter_stored_rows(index, ["row_id", "uri", "reason"]) for row in table.to_pylist())
    return [row["row_id"] for row in rows if row["reason"] != ERASED and matches(row["uri"])]


def _stored_rows_that_pass(index: CommittedIndex, where: str) -> list[int]:
    """Return the ids of all rows that pass the filter `where`, including deleted rows."""
    from edje_index.search.row_filters import RowFilters
    from storage_formats.format.rows import ERASED

    filters = RowFilters(index, with_deleted=True)
    return np.flatnonzero(filters.passing(where) & ~filters.passing(f"reason = '{ERASED}'")).tolist()
