"""Compactions, merges and copies: write rows of indexes anew, without the model. No token is decoded."""

from __future__ import annotations

import bisect
import datetime
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.engines.base import TaskInterrupted, open_engine
from pipelines.environment import free_disk
from pipelines.jobs.build import ignore, never
from pipelines.jobs.plan import (
    SOURCES_MEMBER,
    holds_clips,
    recorded_sources,
    stopping_on_full_disk,
    with_sources,
)
from pipelines.jobs.resources import disk_need
from pipelines.jobs.shard_run import run_shards
from pipelines.progress.events import JobStopped, OnEvent, PlanReady, Progress, ShardState, ShouldStop, StatusMessage
from pipelines.progress.wording import counted, human_bytes
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import IndexSpec, Segment
from storage_formats.format.object_store import IndexLocation, index_location, is_url, local_path

if TYPE_CHECKING:
    from storage_formats.change import Change
    from storage_formats.format.manifest import CommittedIndex, Manifest
    from storage_formats.format.receipts import ShardReceipt
    from storage_formats.format.shard_table import FileEntry
    from storage_formats.writing.index_copy import CopyTarget

Ints = NDArray[np.int64]
CopyShard = Callable[[int, Callable[[int], None], ShouldStop], "ShardReceipt"]
"""Function that writes the shard with a number and returns its receipt. It reports the number of rows copied so far."""

_FILES_AT_ONCE = 8
_HASH = "S64"  # SHA-256, hexadecimal


@dataclass(frozen=True)
class CompactResult:
    """The result of a compaction.

    Attributes:
        rows: number of rows of the compacted index.
        removed: number of deleted rows that were removed; 0 if there was nothing to do.
        first_row: first row id of the copied rows.
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


@name_missing_extra("search")
def compact_index(
    index: str | Path,
    *,
    only_shards_with_deleted: bool = False,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> CompactResult:
    """Rewrite an index without its deleted rows, as `edje-index compact` does. The model is not needed.

    The copied rows get new ids. `storage_formats.TokenStore.translate` maps old row ids to new row ids. If no row is
    deleted, the index does not change. Call the function again to resume a stopped compaction.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://` or `az://`).
            The index can be read during the compaction.
        only_shards_with_deleted: True to copy only the rows of shards with deleted rows, and of shards with
            duplicates of these rows. The other rows keep their ids.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Raises:
        UsageError: there is no index at `index`, all rows are deleted, or the disk is too small.
        JobStopped: the compaction stopped early, or a row is damaged. Finished shards are kept.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index.
        MissingExtraError: FAISS is not installed, but the index has a nearest-neighbour index.

    Example:
        >>> from pipelines import compact_index, delete_rows
        >>> from storage_formats import TokenStore
        >>> _ = delete_rows("pages.edje", rows=[0, 1, 2])
        >>> compact_index("pages.edje").rows
        27
        >>> TokenStore.open("pages.edje").translate([2, 3])
        array([  -1, 1024])
    """
    from storage_formats.change import begin_change
    from storage_formats.format.manifest import RowMap
    from storage_formats.format.row_map import write_row_map
    from storage_formats.format.selection import Selection
    from storage_formats.writing.copying import RowCopier
    from storage_formats.writing.working_copy import working_copy

    started = time.monotonic()
    with (
        working_copy(index) as copy,
        begin_change(copy.root, "compact", {"only_shards_with_deleted": only_shards_with_deleted}) as change,
    ):
        assert change.index is not None
        source, manifest, spec = change.index, change.index.manifest, change.index.manifest.spec
        removed, row_map = len(source.deleted), None
        if removed:
            shards = list(spec.shard_numbers())
            if only_shards_with_deleted:
                shards = shards_to_compact(source)
            selection = Selection.of(source, shards=shards)
            kept = _segments_without(spec, set(shards))
            if not len(selection) and not kept:
                raise UsageError(f"cannot compact {index}: all its rows are deleted; delete the directory instead")
            first_shard = max(spec.shards, manifest.snapshot.next_shard)
            new = Segment(first_shard * spec.shard_size, len(selection))
            segments = (*kept, new) if len(selection) else kept
            target = replaced(spec, rows=segments[-1].stop, segments=segments)
            text = f"compact {manifest.snapshot} {manifest.shard_tables} {spec.precisions} {shards}"
            plan = hashlib.sha256(text.encode()).hexdigest()
            receipts: list[ShardReceipt] = []
            if len(selection):
                _check_disk(change.layout.root, target, new.rows)
                copier = RowCopier(source, selection, change.layout, target, plan)
                try:
                    new_shards = target.segment_shards(new)
                    receipts = _copy_shards(
                        change, new_shards, new.rows, plan, copier.copy_shard, on_event, should_stop
                    )
                finally:
                    copier.close()
            with stopping_on_full_disk(change.layout.root):
                changed = _compacted(change, target, set(shards), receipts, on_event)
                parts = ((row_ids, new.first_row + ranks) for row_ids, ranks in selection.by_shard())
                entry = RowMap(write_row_map(change.layout, parts), new.first_row, is_partial=bool(kept))
                changed = replaced(changed, row_maps=(*manifest.row_maps, entry))
                row_map = entry.file.path
                details = {"first_row": new.first_row, "rows": new.rows, "removed": removed}
                manifest = change.commit(changed, details).manifest
    spec = manifest.spec
    return CompactResult(
        rows=spec.used_rows,
        removed=removed,
        first_row=spec.used_segments[-1].first_row if removed else spec.used_segments[0].first_row,
        shards=spec.used_shards,
        row_map=None if row_map is None else f"{str(index).rstrip('/')}/{row_map}",
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
    )


def shards_to_compact(index: CommittedIndex) -> list[int]:
    """Return the shards with deleted rows, and those with duplicates of a row of these shards, ascending."""
    from storage_formats.format.rows import iter_stored_rows

    spec, shards = index.manifest.spec, set(index.deleted.shards.tolist())
    grew = bool(index.manifest.counts.duplicates)
    while grew:
        before = len(shards)
        numbers = list(spec.shard_numbers())
        for shard, table in zip(numbers, iter_stored_rows(index, ["duplicate_of"]), strict=True):
            originals = table["duplicate_of"].drop_null().to_numpy() // spec.shard_size
            if shard not in shards and shards.intersection(originals.tolist()):
                shards.add(shard)
        grew = len(shards) > before
    return sorted(shards)


def _segments_without(spec: IndexSpec, shards: set[int]) -> tuple[Segment, ...]:
    """Return the segments of `spec`, cut so that they do not contain `shards`."""
    segments: list[Segment] = []
    for segment in spec.used_segments:
        start = None
        numbers = spec.segment_shards(segment)
        for shard in (*numbers, numbers.stop):
            if shard in shards or shard == numbers.stop:
                if start is not None:
                    stop = min(segment.stop, shard * spec.shard_size)
                    segments.append(Segment(start * spec.shard_size, stop - start * spec.shard_size))
                start = None
            elif start is None:
                start = shard
    return tuple(segments)


def _compacted(
    change: Change, target: IndexSpec, shards: set[int], receipts: list[ShardReceipt], on_event: OnEvent
) -> Manifest:
    """Write the shard tables and the nearest-neighbour index after a compaction of `shards`. Return the manifest."""
    from storage_formats.format.manifest import Counts
    from storage_formats.format.rows import DUPLICATE, INDEXED, failures_by_reason, iter_stored_rows
    from storage_formats.format.shard_table import read_shard_tables
    from storage_formats.writing.copying import count_values, with_values
    from storage_formats.writing.publish import add_counts, total_counts, write_shard_tables

    assert change.index is not None
    index, manifest, layout = change.index, change.index.manifest, change.layout
    counts, values = total_counts(receipts), count_values(layout, [each.shard for each in receipts], manifest.columns)
    is_partial = len(target.used_segments) > 1 or not receipts
    if is_partial:
        names = [column.name for column in manifest.columns]
        kept, left_out = [], Counts(0, 0, 0)
        values.update({column.name: column.values for column in manifest.columns})
        for table in iter_stored_rows(index, ["status", "reason", *names], sorted(shards)):
            statuses, failed = table["status"].to_pylist(), failures_by_reason(table)
            of_shard = Counts(len(table), statuses.count(INDEXED), statuses.count(DUPLICATE), failed)
            left_out = add_counts(left_out, of_shard)
            values.subtract({name: len(table) - table[name].null_count for name in names})
        failed = {reason: number - left_out.failed.get(reason, 0) for reason, number in manifest.counts.failed.items()}
        kept_counts = Counts(
            manifest.counts.inputs - left_out.inputs,
            manifest.counts.indexed - left_out.indexed,
            manifest.counts.duplicates - left_out.duplicates,
            {reason: number for reason, number in failed.items() if number},
        )
        counts = add_counts(kept_counts, counts)
    kept = [line for line in read_shard_tables(index.root, manifest.shard_tables) if line[0] not in shards]
    files = [(receipt.shard, file) for receipt in receipts for file in receipt.files]
    tables = write_shard_tables(layout, target, [*kept, *files])
    groups = recorded_sources(manifest)
    if groups is not None:
        manifest = with_sources(manifest, groups)
    return replaced(
        manifest,
        spec=target,
        counts=counts,
        shard_table=tables[0],
        further_tables=tuple(tables[1:]),
        ann=_ann_after(change, target, shards, bool(receipts), on_event)
        if is_partial
        else build_copied_ann(layout.root, target, [manifest], on_event, replace_file=False),
        snapshot=replaced(manifest.snapshot, deleted=None, deleted_rows=0),
        columns=with_values(manifest.columns, values),
    )


def _ann_after(change: Change, target: IndexSpec, shards: set[int], has_new: bool, on_event: OnEvent) -> dict[str, Any]:
    """Remove the rows of `shards` from the nearest-neighbour index, and add the new rows. Return its description."""
    from edje_index.indexing.faiss_index import ann_without_rows, extend_ann

    assert change.index is not None
    index = change.index
    if not index.manifest.ann.get("files"):
        return index.manifest.ann
    on_event(StatusMessage("changing the nearest-neighbour index"))
    row_ids = [row for shard in sorted(shards) for row in index.manifest.spec.shard_rows(shard)]
    ann = ann_without_rows(index, row_ids)
    return extend_ann(change.layout, target, ann) if has_new else ann


@dataclass(frozen=True)
class MergedInput:
    """One of the indexes that were merged.

    Attributes:
        index: directory of the index.
        offset: number that is added to the row ids of this index to get the row ids in the merged index.
        rows: number of rows, including deleted rows and duplicates.
        duplicates: number of rows that are deleted in the merged index, because an earlier index has the same content.
    """

    index: str
    offset: int
    rows: int
    duplicates: int


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge.

    Attributes:
        inputs: the merged indexes, in the order of their rows.
        rows: number of rows of the new index that are not deleted.
        duplicates: number of rows that are deleted in the new index, because an earlier index has the same content.
        shards: number of shards of the new index.
        seconds: wall time of this run.

    Example:
        >>> from pipelines import append_index, build_index, merge_indexes
        >>> _ = build_index("photos/0.jpg", "more.edje", "model", engine="inline", threads=1)
        >>> result = merge_indexes(["photos.edje", "more.edje"], "all.edje")
        >>> result.rows, result.duplicates, [each.offset for each in result.inputs]
        (6, 1, [0, 1024])
    """

    inputs: tuple[MergedInput, ...]
    rows: int
    duplicates: int
    shards: int
    seconds: float


@name_missing_extra("search")
def merge_indexes(
    indexes: Sequence[str | Path],
    out: str | Path,
    *,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> MergeResult:
    """Copy several indexes of the same model into a new index, as `edje-index merge` does. The model is not needed.

    The row ids of the first index stay the same, and those of each further index grow by a constant. If an earlier
    index has an image with the same content, the row is deleted. Call the function again to resume a stopped merge.

    Args:
        indexes: directories of the indexes, in the order of their rows.
        out: directory of the new index.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Raises:
        UsageError: an index does not exist, the indexes differ in model, block shape, shard size, precisions or frames
            per clip, or `out` is not free.
        JobStopped: the merge stopped early, or a file is damaged. Finished shards are kept.
        EdjeError: another process is writing to `out`.
        MissingExtraError: FAISS is not installed, but an index has a nearest-neighbour index.

    Example:
        >>> import shutil
        >>> from pipelines import merge_indexes
        >>> _ = shutil.copytree("photos.edje", "copy.edje")
        >>> merge_indexes(["photos.edje", "copy.edje"], "all.edje").duplicates
        6
    """
    from storage_formats.change import begin_change, begin_index
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.source_columns import MAX_COLUMNS, merge_columns
    from storage_formats.format.tombstones import Tombstones
    from storage_formats.writing.copying import ShardCopier
    from storage_formats.writing.publish import Provenance, new_manifest

    started = time.monotonic()
    opened = [CommittedIndex.open(local_path(root)) for root in indexes]
    _refuse_different(opened)
    first, segments, offsets, firsts = opened[0].manifest.spec, list[Segment](), list[int](), list[int]()
    for each in opened:
        used = each.manifest.spec.used_segments
        next_row = -(-segments[-1].stop // first.shard_size) * first.shard_size if segments else 0
        offsets.append(next_row - used[0].first_row)
        firsts.append(next_row // first.shard_size)
        segments += [Segment(segment.first_row + offsets[-1], segment.rows) for segment in used]
    columns = tuple(sorted(merge_columns(*(each.manifest.columns for each in opened)), key=lambda each: each.name))
    if len(columns) > MAX_COLUMNS:
        raise UsageError(
            f"the merged index would have {len(columns)} source columns; merge fewer indexes, so that the index has at "
            f"most {MAX_COLUMNS}"
        )
    spec = replaced(first, rows=segments[-1].stop, segments=tuple(segments))
    states = [(str(each.root), each.manifest.shard_tables, each.manifest.snapshot.deleted) for each in opened]
    plan = hashlib.sha256(f"merge {states} {columns}".encode()).hexdigest()
    manifests = [each.manifest for each in opened]
    target = local_path(out)
    with begin_change(target, "merge", {"plan": plan}, is_new=True) as change, stopping_on_full_disk(target):
        begin_index(change.layout.root, spec)
        change.store_plan({})
        copiers = [ShardCopier(each, offset, change.layout, plan) for each, offset in zip(opened, offsets, strict=True)]

        def copy_shard(shard: int, on_rows: Callable[[int], None], should_stop: ShouldStop) -> ShardReceipt:
            position = bisect.bisect_right(firsts, shard) - 1
            return copiers[position].copy_shard(shard - offsets[position] // spec.shard_size)

        shards = list(spec.shard_numbers())
        receipts = _copy_shards(change, shards, spec.used_rows, plan, copy_shard, on_event, should_stop)
        ann = build_copied_ann(change.layout.root, spec, manifests, on_event)
        on_event(StatusMessage("looking for duplicates"))
        duplicates, deleted = _find_duplicates(opened), Tombstones.none(spec.shard_size)
        for each, rows, offset in zip(opened, duplicates, offsets, strict=True):
            deleted = deleted.with_rows(np.concatenate([each.deleted.row_ids(), rows]) + offset)
        lists = [each.encoded_from for each in manifests]
        origins = {name: max((each.get(name, ()) for each in lists), key=len) for name in spec.precisions}
        provenance = Provenance(
            manifests[0].model,
            _merged_settings(manifests),
            plan,
            {name: each for name, each in origins.items() if each},
        )
        inputs: list[dict[str, Any]] = [
            {
                "name": each.root.name,
                "first_row": each.manifest.spec.used_segments[0].first_row + offset,
                "offset": offset,
                "rows": each.manifest.spec.used_rows,
                "duplicates": len(rows),
            }
            for each, rows, offset in zip(opened, duplicates, offsets, strict=True)
        ]
        manifest = new_manifest(
            change.layout, spec, receipts, provenance, ann, columns,
            change={"kind": "merge", "created": _now(), "inputs": inputs}, deleted=deleted,
        )  # fmt: skip
        change.commit(manifest)
    merged = tuple(
        MergedInput(str(root), each["offset"], each["rows"], each["duplicates"])
        for root, each in zip(indexes, inputs, strict=True)
    )
    rows_left = manifest.counts.inputs - manifest.snapshot.deleted_rows
    return MergeResult(
        merged, rows_left, sum(each.duplicates for each in merged), len(receipts), time.monotonic() - started
    )


def _refuse_different(indexes: Sequence[CommittedIndex]) -> None:
    """Raise UsageError unless the indexes can be merged: at least two different ones, of one model and shape."""
    if len(indexes) < 2:
        raise UsageError("a merge needs at least two indexes", parameter="indexes")
    roots = [index.root.resolve() for index in indexes]
    for position, root in enumerate(roots):
        if root in roots[:position]:
            raise UsageError(f"{indexes[position].root} is given twice; give each index only once", parameter="indexes")
    same_model = "only indexes of the same model can be merged"
    advice = {
        "encoder fingerprint": same_model,
        "block shape": same_model,
        "width of embeddings": same_model,
        "rows per shard": "build one of the indexes again with the shard size of the other",
        "precisions": "add or drop precisions with 'edje-index quantize' first",
        "frames per clip": "build them with the same number of frames, or keep them apart",
    }

    def properties(index: CommittedIndex) -> dict[str, str]:
        manifest, spec = index.manifest, index.manifest.spec
        return {
            "encoder fingerprint": str(manifest.model["fingerprint"]),
            "block shape": " x ".join(map(str, spec.block_shape)),
            "width of embeddings": str(spec.embed_dim),
            "rows per shard": str(spec.shard_size),
            "precisions": ", ".join(sorted(spec.precisions)),
            "frames per clip": str(manifest.settings["frames"]) if holds_clips(manifest) else "images only",
        }

    for other in indexes[1:]:
        left, right = properties(indexes[0]), properties(other)
        for name in (name for name in advice if left[name] != right[name]):
            raise UsageError(
                f"{indexes[0].root} and {other.root} cannot be merged: the {name} is {left[name]} in "
                f"{indexes[0].root} and {right[name]} in {other.root}; {advice[name]}",
                parameter="indexes",
            )


def _find_duplicates(indexes: Sequence[CommittedIndex]) -> list[Ints]:
    """Find rows that have the same content as an indexed row of an earlier index. Deleted rows are ignored.

    Returns:
        For each index, the row ids of the duplicates in this index, int64 [k].
    """
    from storage_formats.format.rows import INDEXED, iter_rows

    known: NDArray[np.bytes_] = np.empty(0, _HASH)
    duplicates = []
    for index in indexes:
        rows, hashes = [np.empty(0, np.int64)], [np.empty(0, _HASH)]
        for table in iter_rows(index, ["row_id", "content_hash", "status"]):
            values = np.array([(value or "").encode() for value in table["content_hash"].to_pylist()], _HASH)
            is_known = np.isin(values, known) & (values != b"")
            rows.append(table["row_id"].to_numpy()[is_known])
            indexed = np.array([status == INDEXED for status in table["status"].to_pylist()], dtype=np.bool_)
            hashes.append(values[(values != b"") & indexed])
        duplicates.append(np.concatenate(rows))
        known = np.unique(np.concatenate([known, *hashes]))
    return duplicates


def _merged_settings(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return the settings of the first index, with the sources of all indexes."""
    settings = {name: value for name, value in manifests[0].settings.items() if name != SOURCES_MEMBER}
    digests = [manifest.settings.get("inputs_digest") for manifest in manifests]
    if None not in digests:
        settings["inputs_digest"] = hashlib.sha256(" ".join(map(str, digests)).encode()).hexdigest()
    groups = [recorded_sources(manifest) for manifest in manifests]
    if None in groups:
        return settings
    every = dict.fromkeys(group for of_input in groups for group in of_input or ())
    return {**settings, SOURCES_MEMBER: [asdict(group) for group in every]}


@dataclass(frozen=True)
class CopyResult:
    """The result of a copy.

    Attributes:
        snapshot: number of the copied snapshot.
        rows: number of rows of the copy that are not deleted.
        files: number of files of the copy, apart from `index.json`.
        copied_files: number of files that this run wrote. The other files were already in the destination.
        copied_bytes: length of the written files in bytes.
        seconds: wall time of this run.

    Example:
        >>> from pipelines import copy_index
        >>> result = copy_index("photos.edje", "backup.edje")
        >>> result.snapshot, result.files
        (0, 9)
        >>> copy_index("photos.edje", "part.edje", rows=[1, 3]).rows
        2
    """

    snapshot: int
    rows: int
    files: int
    copied_files: int
    copied_bytes: int
    seconds: float


@name_missing_extra("search")
def copy_index(
    index: str | Path,
    out: str | Path,
    *,
    snapshot: int | None = None,
    replace: bool = False,
    rows: Sequence[int] = (),
    where: str | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> CopyResult:
    """Copy a snapshot of an index between directories and object stores, as `edje-index copy` does.

    With `rows` or `where`, only these rows are copied, to a directory. They get the row ids from 0. No token is
    decoded, and the model is not needed. Call the function again with the same arguments to resume a stopped copy.

    Args:
        index: directory of the index, or its URL.
        out: directory of the copy, or its URL on an object store (`s3://`, `gs://` or `az://`).
        snapshot: number of the snapshot to copy; None copies the current snapshot.
        replace: True to remove an index at the URL `out` first.
        rows: ids of the rows to copy.
        where: filter such as "licence is null", see `edje_index.search.where`. The rows that pass it are copied.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Raises:
        UsageError: there is no index at `index`, `out` is not free, no row is selected, or an argument is invalid.
        RowIdError: a row id does not exist.
        JobStopped: the copy stopped early. The copied files are kept.
        CorruptIndexError: a file of the index is missing or damaged.
        EdjeError: another writer changes the index at `out`.

    Example:
        >>> from pipelines import copy_index
        >>> copy_index("photos.edje", "part.edje", rows=[1, 3]).rows
        2
    """
    from storage_formats.format.mirror import open_index

    started = time.monotonic()
    if replace and not is_url(out):
        raise UsageError(
            f"only an index at a URL can be replaced, but {out} is a directory; leave out `replace`",
            parameter="replace",
        )
    opened = open_index(index, snapshot)
    if len(rows) or where is not None:
        files, copied, count = _copy_part(opened, out, rows, where, on_event, should_stop)
    else:
        files, copied = _copy_whole(opened, index_location(out), on_event, should_stop, replaces=replace)
        count = opened.manifest.counts.inputs - opened.manifest.snapshot.deleted_rows
    return CopyResult(
        snapshot=opened.manifest.snapshot.number,
        rows=count,
        files=len(files),
        copied_files=len(copied),
        copied_bytes=sum(entry.bytes for entry in copied),
        seconds=time.monotonic() - started,
    )


def _copy_part(
    index: CommittedIndex,
    out: str | Path,
    rows: Sequence[int],
    where: str | None,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> tuple[list[FileEntry], list[FileEntry], int]:
    """Copy the selected rows to a new index. Return (all files, files that this run wrote, number of rows)."""
    from edje_index.search.row_filters import RowFilters
    from storage_formats.change import begin_change, begin_index
    from storage_formats.format.selection import Selection
    from storage_formats.format.tombstones import check_rows_in_use, live_rows
    from storage_formats.row_ids import check_row_ids
    from storage_formats.writing.copying import RowCopier, count_values, with_values
    from storage_formats.writing.publish import Provenance, new_manifest

    manifest = index.manifest
    requested = check_row_ids(rows, manifest.spec.rows)
    check_rows_in_use(requested, manifest.spec)
    index.deleted.refuse(requested)
    passing = np.empty(0, np.int64) if where is None else RowFilters(index).row_ids(where)
    live = live_rows(index)
    chosen = np.isin(live, np.concatenate([requested, passing]))
    if not chosen.any():
        raise UsageError("no row is selected; choose other rows or another filter", parameter="where")
    selection = Selection.of(index, index.deleted.with_rows(live[~chosen]))
    spec = replaced(manifest.spec, rows=len(selection), segments=())
    identity = [str(index.location), manifest.snapshot.number, manifest.plan, live[chosen].tobytes().hex()]
    plan = hashlib.sha256(repr(identity).encode()).hexdigest()
    with begin_change(local_path(out), "copy", {"plan": plan}, is_new=True) as change:
        root = change.layout.root
        with stopping_on_full_disk(root):
            _check_disk(root, spec, spec.rows)
            begin_index(root, spec)
            finished = change.receipts(range(spec.shards), plan)
            copier = RowCopier(index, selection, change.layout, spec, plan)
            try:
                receipts = _copy_shards(
                    change, range(spec.shards), spec.rows, plan, copier.copy_shard, on_event, should_stop
                )
            finally:
                copier.close()
            columns = with_values(manifest.columns, count_values(change.layout, range(spec.shards), manifest.columns))
            ann = build_copied_ann(root, spec, [manifest], on_event)
            settings = with_sources(manifest, None).settings
            provenance = Provenance(manifest.model, settings, plan, manifest.encoded_from)
            details = {"kind": "copy", "created": _now(), "name": index.root.name, "snapshot": manifest.snapshot.number}
            change.commit(new_manifest(change.layout, spec, receipts, provenance, ann, columns, change=details))
    files = [file for receipt in receipts for file in receipt.files]
    written = [file for receipt in receipts if receipt.shard not in finished for file in receipt.files]
    return files, written, spec.rows


def _copy_whole(
    index: CommittedIndex, out: IndexLocation, on_event: OnEvent, should_stop: ShouldStop, *, replaces: bool
) -> tuple[list[FileEntry], list[FileEntry]]:
    """Copy all files of a snapshot. Return (all files, files that this run copied)."""
    from storage_formats.change import begin_change, begin_index
    from storage_formats.format.object_store import ObjectFolder
    from storage_formats.writing.index_copy import (
        DirectoryTarget,
        begin_remote_copy,
        files_to_copy,
        manifest_bytes,
    )

    entries = files_to_copy(index)
    on_event(StatusMessage(f"copying {len(entries):,} files of snapshot {index.manifest.snapshot.number}"))
    if is_url(out):
        remote = begin_remote_copy(index, ObjectFolder.open(str(out)), entries, replace=replaces)
        copied = _copy_files(index, entries, remote, on_event, should_stop)
        remote.commit(index, entries)
        return entries, copied
    data = manifest_bytes(index)
    request = {"manifest": hashlib.sha256(data).hexdigest()}
    with begin_change(Path(out), "copy", request, is_new=True) as change, stopping_on_full_disk(Path(out)):
        begin_index(change.layout.root, index.manifest.spec)
        change.store_plan({})
        copied = _copy_files(index, entries, DirectoryTarget(change.layout.root), on_event, should_stop)
        change.commit_copy(data)
    return entries, copied


def _copy_files(
    index: CommittedIndex,
    entries: Sequence[FileEntry],
    target: CopyTarget,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> list[FileEntry]:
    """Copy files with several threads. Return the entries of the files that `target` did not have."""
    copied: list[FileEntry] = []
    running: dict[Future[bool], FileEntry] = {}
    done, waiting = 0, iter(entries)
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        while True:
            stopped = should_stop()
            while not stopped and len(running) < 2 * _FILES_AT_ONCE and (entry := next(waiting, None)):
                running[pool.submit(target.copy, index, entry)] = entry
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                entry = running.pop(future)
                if future.result():
                    copied.append(entry)
                done += 1
            on_event(Progress("copying files", done, len(entries)))
    if done < len(entries):
        raise JobStopped(f"stopped after {done:,} of {len(entries):,} files; the copied files are kept")
    return copied


def _copy_shards(
    change: Change,
    shards: Sequence[int],
    rows: int,
    plan: str,
    copy_shard: CopyShard,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> list[ShardReceipt]:
    """Write the shards that earlier runs did not finish, in this process. Return the receipts of all `shards`.

    Raises:
        JobStopped: `should_stop()` returned True, or a shard failed. Finished shards are kept.
    """
    from storage_formats.writing.copying import CopyInterrupted

    receipts = change.receipts(shards, plan)
    on_event(PlanReady(rows, len(shards), len(receipts)))

    def run(shard: _Shard, on_progress: Callable[[Any], None], should_stop: ShouldStop) -> ShardReceipt:
        try:
            return copy_shard(shard.shard, lambda done: on_progress((shard.shard, ShardState(done))), should_stop)
        except CopyInterrupted as error:
            raise TaskInterrupted from error

    finished = run_shards(
        "copying",
        shards,
        rows,
        receipts,
        engine=open_engine("inline", None),
        make_worker=lambda: run,
        make_task=_Shard,
        on_event=on_event,
        should_stop=should_stop,
    )
    return sorted(finished, key=lambda receipt: receipt.shard)


@dataclass(frozen=True)
class _Shard:
    """Task that writes the shard with the number `shard`."""

    shard: int


def _check_disk(root: Path, spec: IndexSpec, rows: int) -> None:
    """Raise UsageError if the disk has no room for `rows` new rows of an index with the shape `spec`."""
    need, free = sum(disk_need(replaced(spec, rows=rows, segments=())).values()), free_disk(root)
    if need > free:
        raise UsageError(
            f"copying {counted(rows, 'row')} needs {human_bytes(need)} of disk space, but only {human_bytes(free)} are "
            f"free at {root}; free some disk space"
        )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def build_copied_ann(
    root: Path, spec: IndexSpec, origins: Sequence[Manifest], on_event: OnEvent, *, replace_file: bool = True
) -> dict[str, Any]:
    """Build a nearest-neighbour index of copied rows, if one of their indexes has one.

    It gets the kind that the user chose for the indexes `origins`, and the highest of their target recalls. If all
    kinds are default kinds, it gets the default kind for the new number of rows, with the smallest codes of all
    `origins`. If the kinds differ, it gets the default kind.

    Args:
        root: directory of the index with the copied rows.
        spec: shape of the copied rows.
        origins: manifests of the indexes that the rows come from.
        on_event: receives the events of the job.
        replace_file: see `build_ann`.

    Returns:
        The entry of the nearest-neighbour index in the manifest.
    """
    searchable = [manifest for manifest in origins if manifest.ann_files]
    if not searchable:
        return origins[0].ann
    from edje_index.indexing.ann_kind import AnnKind
    from edje_index.indexing.faiss_index import AnnRequest, build_ann, default_position

    requests = [AnnRequest.like(manifest.ann) for manifest in searchable]
    recall = max(request.recall for request in requests)
    positions = [position for position in map(default_position, searchable) if position is not None]
    kinds = sorted({request.ann for request in requests})
    if len(positions) == len(searchable):
        defaults = AnnKind.defaults(spec.used_rows, spec.embed_dim)
        kind = defaults[min(max(positions), len(defaults) - 1)].factory
    elif len(kinds) == 1:
        kind = kinds[0]
    else:
        kind, differing = "auto", ", ".join(kinds)
        on_event(
            StatusMessage(
                f"nearest-neighbour indexes of different kinds ({differing}); the new one has the default kind"
            )
        )
    on_event(StatusMessage("building the nearest-neighbour index"))
    ann = build_ann(root, spec, replace_file=replace_file, request=AnnRequest(kind, recall))
    if kind not in ("auto", ann.get("factory", "Flat")):
        on_event(StatusMessage(f"there are too few rows for a nearest-neighbour index {kind}; it is Flat now"))
    return ann
