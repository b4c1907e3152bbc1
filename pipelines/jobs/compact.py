"""The compaction job: writes the rows that are not deleted into new shards, and commits a snapshot."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.engines.base import describe_error
from pipelines.jobs.copy_rows import copy_rows
from pipelines.jobs.copy_shards import build_copied_ann
from pipelines.jobs.leftovers import discard_stopped_copy, refuse_unfinished_append, remove_leftovers
from pipelines.jobs.lock import locked_index
from pipelines.planning.recorded_sources import recorded_sources, with_sources
from pipelines.progress.events import JobStopped, OnEvent, ShouldStop
from storage_formats.errors import UsageError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex, Manifest
    from storage_formats.format.object_store import IndexLocation
    from storage_formats.format.receipts import ShardReceipt
    from storage_formats.writing.row_copy import RowCopy


@dataclass(frozen=True)
class CompactResult:
    """The result of a compaction.

    Attributes:
        rows: number of rows of the compacted index.
        removed: number of deleted rows that were removed; 0 if there was nothing to do.
        first_row: first row id of the compacted index.
        shards: number of shards of the compacted index.
        row_map: path or URL of the Parquet file that maps old row ids to new row ids; None if there was nothing to do.
        snapshot: number of the current snapshot.
        seconds: wall time of this run.

    Example:
        >>> from pipelines import compact_index, delete_rows
        >>> _ = delete_rows("photos.edje", rows=[0, 5])
        >>> result = compact_index("photos.edje")
        >>> result.rows, result.removed, result.first_row, result.snapshot
        (4, 2, 1024, 2)
    """

    rows: int
    removed: int
    first_row: int
    shards: int
    row_map: str | None
    snapshot: int
    seconds: float


def run_compact(location: IndexLocation, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> CompactResult:
    """Copy the rows of the index at `location` that are not deleted into new shards, and commit a snapshot.

    If no row is deleted, the index does not change. A stopped compaction is resumed.

    Raises:
        UsageError: there is no index at `location`, all rows are deleted, or the disk is too small.
        JobStopped: the compaction stopped early, or a row is damaged. Finished shards are kept.
        EdjeError: another process is changing the index, or an append to the index has not finished.
    """
    from storage_formats.writing.working_copy import working_copy

    with working_copy(location) as copy:
        result = _compact(copy.root, on_event, should_stop)
    if result.row_map is None:
        return result
    return replace(result, row_map=f"{str(location).rstrip('/')}/{result.row_map}")


def _compact(root: Path, on_event: OnEvent, should_stop: ShouldStop) -> CompactResult:
    from storage_formats.format.manifest import CommittedIndex

    started = time.monotonic()
    CommittedIndex.open(root)  # fails before the lock makes a directory
    remove_leftovers(root)
    with locked_index(root):
        index = CommittedIndex.open(root)
        refuse_unfinished_append(index)
        if not len(index.deleted):
            if Layout(index.root).compaction.exists():
                discard_stopped_copy(index, on_event)
            return _result(index.manifest, 0, time.monotonic() - started)
        copy = _plan(index)
        receipts = copy_rows(copy, "copying", _begin(index, copy, on_event), on_event, should_stop)
        manifest = _publish(index, copy, receipts, on_event)
    return _result(manifest, len(index.deleted), time.monotonic() - started)


def _plan(index: CommittedIndex) -> RowCopy:
    from storage_formats.format.selection import Selection
    from storage_formats.writing.row_copy import RowCopy

    manifest, selection = index.manifest, Selection.of(index)
    if not len(selection):
        raise UsageError(f"cannot compact {index.root}: all its rows are deleted; delete the directory instead")
    first_shard = max(manifest.spec.shards, manifest.snapshot.next_shard)
    text = f"compact {manifest.snapshot} {manifest.shard_tables} {manifest.spec.precisions}"
    plan = hashlib.sha256(text.encode()).hexdigest()
    return RowCopy.plan_segment(index, selection, index.root, first_shard * manifest.spec.shard_size, plan)


def _begin(index: CommittedIndex, copy: RowCopy, on_event: OnEvent) -> dict[int, ShardReceipt]:
    """Return the receipts of an earlier run of the same compaction. Files of a different compaction are discarded."""
    from storage_formats.atomic import write_json_atomic
    from storage_formats.format.index_files import read_index_file
    from storage_formats.format.receipts import read_receipts

    layout, marker = Layout(index.root), {"plan": copy.plan}
    try:
        resumed = json.loads(read_index_file(layout.root, layout.compaction)) == marker
    except (OSError, ValueError, RecursionError):
        resumed = False
    if not resumed:
        discard_stopped_copy(index, on_event)
        write_json_atomic(layout.compaction, marker)
    return read_receipts(layout, copy.shards, copy.plan)


def _publish(index: CommittedIndex, copy: RowCopy, receipts: list[ShardReceipt], on_event: OnEvent) -> Manifest:
    """Build the nearest-neighbour index of the copied rows, and commit the snapshot. Return the new manifest."""
    from storage_formats.writing.publish import remove_build
    from storage_formats.writing.snapshots import commit_compaction

    groups = recorded_sources(index.manifest)
    if groups is not None:
        index = replace(index, manifest=with_sources(index.manifest, groups))
    try:
        ann = build_copied_ann(index.root, copy.spec, [index.manifest], on_event, replace_file=False)
        manifest = commit_compaction(index, copy, receipts, ann)
        remove_build(Layout(index.root))
        return manifest
    except OSError as error:
        reason = f"cannot write {index.root}: {describe_error(error)}; finished shards are kept"
        raise JobStopped(reason) from error


def _result(manifest: Manifest, removed: int, seconds: float) -> CompactResult:
    spec = manifest.spec
    return CompactResult(
        rows=spec.used_rows,
        removed=removed,
        first_row=spec.used_segments[0].first_row,
        shards=sum(1 for _ in spec.shard_numbers()),
        row_map=manifest.row_maps[-1].file.path if removed else None,
        snapshot=manifest.snapshot.number,
        seconds=seconds,
    )
