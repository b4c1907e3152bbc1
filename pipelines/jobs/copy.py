"""Compactions and copies: write rows of an index anew, without the model. No token
is decoded.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edje_index.indexing.ann_kind import AnnKind
from edje_index.indexing.faiss_index import (
    AnnRequest,
    ann_without_rows,
    build_ann,
    extend_ann,
)
from edje_index.progress import ShardProgress
from edje_index.search.rows import IndexRows
from pipelines.engines.base import open_engine
from pipelines.jobs.changing import changing
from pipelines.jobs.encode import run_shards
from pipelines.jobs.hub import send_to_hub
from pipelines.jobs.plan import recorded_sources, with_sources
from pipelines.jobs.resources import check_free_disk, disk_need
from pipelines.progress.events import (
    JobStopped,
    OnEvent,
    PlanReady,
    Progress,
    ShouldStop,
    StatusMessage,
    ignore,
    never,
    stop_at_events,
)
from pipelines.progress.wording import counted, human_bytes
from storage_formats.change import Change, begin_index, now
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import IndexSpec, Segment
from storage_formats.format.manifest import (
    Ann,
    CommittedIndex,
    Counts,
    Manifest,
    RowMap,
)
from storage_formats.format.object_store import (
    ObjectFolder,
    hub_kind,
    index_location,
    is_url,
    local_path,
)
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.remote import ROOT, open_index, read_root
from storage_formats.format.row_map import write_row_map
from storage_formats.format.rows import (
    DUPLICATE,
    INDEXED,
    failures_by_reason,
    iter_stored_rows,
)
from storage_formats.format.selection import Selection
from storage_formats.format.shard_table import FileEntry
from storage_formats.format.tombstones import (
    check_row_ids,
    check_rows_in_use,
    live_rows,
)
from storage_formats.threads import ordered_map
from storage_formats.writing.copying import RowCopier, count_values, with_values
from storage_formats.writing.index_copy import (
    begin_remote_copy,
    copy_to_directory,
    file_contents,
    files_to_copy,
    is_data,
    manifest_bytes,
    what_is_lost,
)
from storage_formats.writing.publish import (
    add_counts,
    new_manifest,
    total_counts,
    write_shard_tables,
)

Ints = NDArray[np.int64]
CopyShard = Callable[[int, Callable[[int], None], ShouldStop], "ShardReceipt"]
"""Function that writes the shard with a number and returns its receipt. It reports
the number of rows copied so far.
"""

_FILES_AT_ONCE = 8


@dataclass(frozen=True)
class CopyResult:
    """The result of a compaction, a merge or a copy.

    Attributes:
        rows: number of rows of the written index. Deleted rows do not count.
        shards: number of shards of the written index.
        snapshot: number of its current snapshot; of a copy, number of the copied
            snapshot.
        seconds: wall time of this run.
        first_row: first row id of the copied rows.
        removed: number of deleted rows that a compaction removed.
        row_map: path or URL of the Parquet file that maps the row ids before a
            compaction to those after it; None if there was nothing to do.
        duplicates: number of rows that a merge deleted, because an earlier index has
            the same content.
        inputs: for each merged index, its `index`, the `offset` added to its row ids,
            and its numbers of `rows` (including deleted rows) and `duplicates`.
        files: number of files of a copy, apart from `index.json`.
        copied_files: number of files that this run wrote. The other files were already
            in the destination.
        copied_bytes: length of the written files in bytes.

    Examples:
        >>> from edje_index import compact_index, copy_index, delete_rows
        >>> result = copy_index("photos.edje", "backup.edje")
        >>> result.snapshot, result.files
        (0, 9)
        >>> _ = delete_rows("backup.edje", rows=[0, 5])
        >>> result = compact_index("backup.edje")
        >>> result.rows, result.removed, result.first_row, result.snapshot
        (4, 2, 1024, 2)
    """

    rows: int
    shards: int
    snapshot: int
    seconds: float
    first_row: int = 0
    removed: int = 0
    row_map: str | None = None
    duplicates: int = 0
    inputs: Sequence[dict[str, Any]] = ()
    files: int = 0
    copied_files: int = 0
    copied_bytes: int = 0


@name_missing_extra("search")
def compact_index(
    index: str | Path,
    *,
    only_shards_with_deleted: bool = False,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> CopyResult:
    """Rewrite an index without its deleted rows, as `edje-index compact` does. The
    model is not needed.

    The copied rows get new ids. `storage_formats.TokenStore.translate` maps old row ids
    to new row ids. If no row is deleted, the shards that are not full are joined if
    that makes fewer; the other rows keep their ids. Call the function again to resume a
    stopped compaction. The other arguments are those of `build_index`.

    Args:
        index: directory of the index. The index can be read during the compaction.
        only_shards_with_deleted: True to copy only the rows of shards with deleted
            rows, and of shards with duplicates of these rows. The other rows keep their
            ids.

    Raises:
        UsageError: there is no index at `index`, all rows are deleted, or the disk is
            too small.
        JobStopped: the compaction stopped early, or a row is damaged. Finished shards
            are kept.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index.
        MissingExtraError: FAISS is not installed, but the index has a nearest-neighbour
            index.

    Examples:
        >>> from edje_index import compact_index, delete_rows
        >>> from storage_formats import TokenStore
        >>> _ = delete_rows("pages.edje", rows=[0, 1, 2])
        >>> compact_index("pages.edje").rows
        27
        >>> TokenStore.open("pages.edje").translate([2, 3])
        array([  -1, 1024])
    """
    started = time.monotonic()
    request = {"only_shards_with_deleted": only_shards_with_deleted}
    with changing(index, "compact", request, on_event) as change:
        assert change.index is not None
        spec = change.index.manifest.spec
        manifest = change.index.manifest
        source = change.index
        removed = len(source.deleted)
        shards = list(spec.shard_numbers())
        if only_shards_with_deleted:
            shards = _with_duplicates(source, source.deleted.shards.tolist())
        elif not removed:
            small = {
                shard: rows
                for shard in shards
                if (rows := len(spec.shard_rows(shard))) < spec.shard_size
            }
            is_saving = -(-sum(small.values()) // spec.shard_size) < len(small)
            shards = _with_duplicates(source, small) if is_saving else []
        if not shards:
            rows = spec.used_rows
            first_row = spec.used_segments[0].first_row
            return CopyResult(
                rows,
                spec.used_shards,
                manifest.snapshot.number,
                time.monotonic() - started,
                first_row,
            )

        # The plan: rows of `shards` move to one new segment, the others stay.
        selection = Selection.of(source, shards=shards)
        kept = _segments_without(spec, set(shards))
        if not len(selection) and not kept:
            raise UsageError(
                f"cannot compact {index}: all its rows are deleted; delete the"
                " directory instead"
            )
        new = Segment(
            max(spec.shards, manifest.snapshot.next_shard) * spec.shard_size,
            len(selection),
        )
        segments = (*kept, new) if len(selection) else kept
        target = replaced(spec, rows=segments[-1].stop, segments=segments)
        text = (
            f"compact {manifest.snapshot} {manifest.shard_tables} {spec.precisions}"
            f" {shards}"
        )
        plan = hashlib.sha256(text.encode()).hexdigest()

        receipts = (
            _copy_rows(change, source, selection, target, plan, on_event, should_stop)
            if len(selection)
            else []
        )

        left_out = Counter[str]()
        failed = Counter(manifest.counts.failed)
        values = Counter({column.name: column.values for column in manifest.columns})
        for table in iter_stored_rows(source, ["status", "reason", *values], shards):
            left_out.update(table["status"].to_pylist())
            failed.subtract(failures_by_reason(table))
            values.subtract(
                {name: len(table) - table[name].null_count for name in values}
            )
        values.update(
            count_values(
                change.layout, [receipt.shard for receipt in receipts], manifest.columns
            )
        )
        counts = Counts(
            manifest.counts.inputs - left_out.total(),
            manifest.counts.indexed - left_out[INDEXED],
            manifest.counts.duplicates - left_out[DUPLICATE],
            {reason: number for reason, number in failed.items() if number},
        )
        if not kept:
            ann = build_copied_ann(
                source.root, target, [manifest], on_event, replace_file=False
            )
        elif manifest.ann_files:
            on_event(StatusMessage("changing the nearest-neighbour index"))
            ann = ann_without_rows(
                source, [row for shard in shards for row in spec.shard_rows(shard)]
            )
            ann = extend_ann(change.layout, target, ann) if receipts else ann
        else:
            ann = manifest.ann
        lines = [line for line in source.shard_files() if line[0] not in set(shards)]
        parts = (
            (row_ids, new.first_row + ranks) for row_ids, ranks in selection.by_shard()
        )
        row_map = RowMap(
            write_row_map(change.layout, parts), new.first_row, is_partial=bool(kept)
        )
        groups = recorded_sources(manifest)
        changed = replaced(
            manifest if groups is None else with_sources(manifest, groups),
            spec=target,
            counts=add_counts(counts, total_counts(receipts)),
            ann=ann,
            snapshot=replaced(manifest.snapshot, deleted=None, deleted_rows=0),
            columns=with_values(manifest.columns, values),
            row_maps=(*manifest.row_maps, row_map),
            **write_shard_tables(change.layout, target, receipts, lines),
        )
        details = {"first_row": new.first_row, "rows": new.rows, "removed": removed}
        manifest = change.commit(changed, details).manifest
    return CopyResult(
        rows=target.used_rows,
        shards=target.used_shards,
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
        first_row=target.used_segments[-1].first_row,
        removed=removed,
        row_map=f"{str(index).rstrip('/')}/{row_map.file.path}",
    )


def _with_duplicates(index: CommittedIndex, some: Iterable[int]) -> list[int]:
    """Return the shards `some`, and those with duplicates of a row of these shards,
    ascending.
    """
    spec = index.manifest.spec
    shards = set(some)
    grew = bool(index.manifest.counts.duplicates)
    while grew:
        before = len(shards)
        numbers = list(spec.shard_numbers())
        for shard, table in zip(
            numbers, iter_stored_rows(index, ["duplicate_of"]), strict=True
        ):
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
                    segments.append(
                        Segment(start * spec.shard_size, stop - start * spec.shard_size)
                    )
                start = None
            elif start is None:
                start = shard
    return tuple(segments)


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
    """Copy a snapshot of an index between directories, object stores and the Hub, as
    `edje-index copy` does.

    With `rows` or `where`, only these rows are copied, to a directory. They get the row
    ids from 0. No token is decoded, and the model is not needed. Call the function
    again with the same arguments to resume a stopped copy. The other arguments are
    those of `build_index`.

    Args:
        index: directory of the index, or its URL.
        out: directory of the copy, or its URL on an object store (`s3://`, `gs://` or
            `az://`) or on the Hugging Face Hub (`hf://datasets/OWNER/NAME`). A
            repository that does not exist is created, and is private.
        snapshot: number of the snapshot to copy; None copies the current snapshot.
        replace: True to remove an index at the URL `out` first.
        rows: ids of the rows to copy.
        where: filter such as "licence is null", see `edje_index.search.where`. The rows
            that pass it are copied.

    Raises:
        UsageError: there is no index at `index`, `out` is not free, no row is selected,
            or an argument is invalid.
        RowIdError: a row id does not exist.
        JobStopped: the copy stopped early. The copied files are kept.
        CorruptIndexError: a file of the index is missing or damaged.
        EdjeError: another writer changes the index at `out`.

    Examples:
        >>> from edje_index import copy_index
        >>> copy_index("photos.edje", "part.edje", rows=[1, 3]).rows
        2
    """
    started = time.monotonic()
    if replace and not is_url(out):
        raise UsageError(
            f"only an index at a URL can be replaced, but {out} is a directory; leave"
            " out `replace`",
            parameter="replace",
        )
    opened = open_index(index, snapshot)
    manifest = opened.manifest
    target = index_location(out)
    spec = manifest.spec
    count = manifest.counts.inputs - manifest.snapshot.deleted_rows
    if len(rows) or where is not None:
        requested = check_row_ids(rows, spec.rows)
        check_rows_in_use(requested, spec)
        opened.deleted.refuse(requested)
        passing = (
            np.empty(0, np.int64)
            if where is None
            else np.flatnonzero(IndexRows(opened).passing(where))
        )
        live = live_rows(opened)
        chosen = np.isin(live, np.concatenate([requested, passing]))
        if not chosen.any():
            raise UsageError(
                "no row is selected; choose other rows or another filter",
                parameter="where",
            )
        selection = Selection.of(opened, opened.deleted.with_rows(live[~chosen]))
        count = len(selection)
        spec = replaced(spec, rows=count, segments=())
        identity = [
            str(opened.location),
            manifest.snapshot.number,
            manifest.plan,
            live[chosen].tobytes().hex(),
        ]
        plan = hashlib.sha256(repr(identity).encode()).hexdigest()
        with changing(
            local_path(out), "copy", {"plan": plan}, on_event, is_new=True
        ) as change:
            root = change.layout.root
            begin_index(root, spec)
            finished = change.receipts(range(spec.shards), plan)
            receipts = _copy_rows(
                change, opened, selection, spec, plan, on_event, should_stop
            )
            columns = with_values(
                manifest.columns,
                count_values(change.layout, range(spec.shards), manifest.columns),
            )
            ann = build_copied_ann(root, spec, [manifest], on_event)
            settings = with_sources(manifest, None).settings
            details = {
                "kind": "copy",
                "created": now(),
                "name": opened.root.name,
                "snapshot": manifest.snapshot.number,
            }
            part = new_manifest(
                change.layout,
                spec,
                receipts,
                columns,
                change=details,
                model=manifest.model,
                settings=settings,
                plan=plan,
                ann=ann,
                encoded_from=manifest.encoded_from,
            )
            change.commit(part)
        files = [file for receipt in receipts for file in receipt.files]
        copied = [
            file
            for receipt in receipts
            if receipt.shard not in finished
            for file in receipt.files
        ]
    else:
        files = list(files_to_copy(opened))
        on_event(
            StatusMessage(
                f"copying {len(files):,} files of snapshot {manifest.snapshot.number}"
            )
        )
        if hub_kind(target) is not None:
            _, there = read_root(ObjectFolder.open(str(target)))
            if (
                there is not None
                and not replace
                and (lost := what_is_lost(opened, str(target), there))
            ):
                raise UsageError(lost, parameter="out")

            def checked(file: FileEntry) -> Path | bytes:
                # compared with the checksum
                pieces = file_contents(opened, file)
                if opened.remote is not None or file.path.endswith("zarr.json"):
                    return b"".join(pieces)
                deque(pieces, maxlen=0)
                return opened.root / file.path

            named: dict[str, Callable[[], Path | bytes]] = {
                **{file.path: partial(checked, file) for file in files},
                ROOT: partial(manifest_bytes, opened),
            }
            report = stop_at_events(
                on_event, should_stop, "stopped; the copied files are kept"
            )
            message = f"Copy snapshot {manifest.snapshot.number}"
            size = human_bytes(sum(file.bytes for file in files))
            sent = send_to_hub(
                str(target),
                "datasets",
                named,
                message,
                report,
                index=opened,
                size=size,
                is_removed=lambda name: replace and is_data(name) and name not in named,
            )
            copied = [file for file in files if file.path in sent]
        elif is_url(target):
            with begin_remote_copy(
                opened, ObjectFolder.open(str(target)), replace=replace
            ) as remote:
                copied = _copy_files(files, remote.put, on_event, should_stop)
                remote.commit()
                if replace:
                    remote.remove_others(files)
        else:
            data = manifest_bytes(opened)
            request = {"manifest": hashlib.sha256(data).hexdigest()}
            with changing(target, "copy", request, on_event, is_new=True) as change:
                root = change.layout.root
                begin_index(root, spec)
                change.store_plan({})
                copied = _copy_files(
                    files,
                    lambda file: copy_to_directory(opened, file, root),
                    on_event,
                    should_stop,
                )
                change.commit_copy(data)
    return CopyResult(
        rows=count,
        shards=spec.used_shards,
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
        files=len(files),
        copied_files=len(copied),
        copied_bytes=sum(entry.bytes for entry in copied),
    )


def _copy_files(
    entries: Sequence[FileEntry],
    copy: Callable[[FileEntry], bool],
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> list[FileEntry]:
    """Call `copy` for each entry, in several threads. Return the entries of the
    files that were not there yet.
    """
    copied = []
    done = 0
    wanted = itertools.takewhile(lambda _: not should_stop(), entries)
    with contextlib.closing(
        ordered_map(copy, wanted, _FILES_AT_ONCE, 2 * _FILES_AT_ONCE)
    ) as results:
        for done, (is_new, entry) in enumerate(zip(results, entries, strict=False), 1):
            copied += [entry] if is_new else []
            on_event(Progress("copying files", done, len(entries)))
    if done < len(entries):
        raise JobStopped(
            f"stopped after {done:,} of {len(entries):,} files; the copied files are"
            " kept"
        )
    return copied


def _copy_rows(
    change: Change,
    source: CommittedIndex,
    selection: Selection,
    spec: IndexSpec,
    plan: str,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> list[ShardReceipt]:
    """Copy the selected rows to the last segment of an index with the shape `spec`.
    Return the receipts.
    """
    segment = spec.used_segments[-1]
    root = change.layout.root
    need = disk_need(replaced(spec, rows=segment.rows, segments=()))
    check_free_disk(root, need, f"a copy of {counted(segment.rows, 'row')}")
    copier = RowCopier(source, selection, change.layout, spec, plan)
    try:
        shards = spec.segment_shards(segment)
        return copy_shards(
            change, shards, segment.rows, plan, copier.copy_shard, on_event, should_stop
        )
    finally:
        copier.close()


def copy_shards(
    change: Change,
    shards: Sequence[int],
    rows: int,
    plan: str,
    copy_shard: CopyShard,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> list[ShardReceipt]:
    """Write the shards that earlier runs did not finish, in this process. Return the
    receipts of all `shards`.

    Raises:
        JobStopped: `should_stop()` returned True, or a shard failed. Finished shards
            are kept.
    """
    receipts = change.receipts(shards, plan)
    on_event(PlanReady(rows, len(shards), len(receipts)))

    def run(
        shard: _Shard, on_progress: Callable[[Any], None], should_stop: ShouldStop
    ) -> ShardReceipt:
        return copy_shard(
            shard.shard,
            lambda done: on_progress(ShardProgress(shard.shard, done)),
            should_stop,
        )

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


def build_copied_ann(
    root: Path,
    spec: IndexSpec,
    origins: Sequence[Manifest],
    on_event: OnEvent,
    *,
    replace_file: bool = True,
) -> Ann:
    """Build a nearest-neighbour index of copied rows, if one of the indexes `origins`
    has one. Return its entry.

    It keeps the kind that they have, with the highest of their target recalls. It gets
    the default kind if their kinds differ, or if all have the default kind for their
    rows.
    """
    searchable = [manifest for manifest in origins if manifest.ann_files]
    if not searchable:
        return origins[0].ann
    requests = [AnnRequest.like(manifest.ann) for manifest in searchable]
    kind, *others = sorted({request.ann for request in requests})
    if others:
        kinds = ", ".join([kind, *others])
        on_event(
            StatusMessage(
                f"nearest-neighbour indexes of different kinds ({kinds}); the new one"
                " has the default kind"
            )
        )
    if others or all(
        AnnKind.choose(manifest.spec.used_rows, manifest.spec.embed_dim).factory == kind
        for manifest in searchable
    ):
        kind = "auto"
    on_event(StatusMessage("building the nearest-neighbour index"))
    request = AnnRequest(kind, max(request.recall for request in requests))
    ann = build_ann(root, spec, replace_file=replace_file, request=request)
    if kind not in ("auto", ann.get("factory", "Flat")):
        on_event(
            StatusMessage(
                f"there are too few rows for a nearest-neighbour index {kind}; it is"
                " Flat now"
            )
        )
    return ann
