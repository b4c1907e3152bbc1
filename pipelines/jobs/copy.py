"""Compactions, copies and merges: write rows of existing indexes to new files, without
the model and without decoding tokens.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.jobs.changing import (
    Edit,
    NewContents,
    ShardWork,
    apply,
    begin,
    begin_new,
    next_first_row,
    notifier,
    resumable,
    rows_passing,
)
from pipelines.jobs.hub import send_to_hub
from pipelines.jobs.plan import (
    holds_clips,
    recorded_sources,
    with_sources,
)
from pipelines.jobs.resources import check_free_disk, disk_need
from pipelines.progress.events import (
    JobStopped,
    OnEvent,
    Progress,
    ShouldStop,
    StatusMessage,
    ignore,
    never,
    stop_at_events,
)
from pipelines.progress.wording import counted, human_bytes
from storage_formats.arguments import as_list
from storage_formats.arrays import Ints
from storage_formats.atomic import Json
from storage_formats.change import begin_index, begin_new_index
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import IndexSpec, Layout, Segment
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.remote import ROOT, open_index, read_root
from storage_formats.format.rows import INDEXED, iter_rows, iter_stored_rows
from storage_formats.format.shard_table import FileEntry
from storage_formats.format.source_columns import MAX_COLUMNS, merge_columns
from storage_formats.format.tombstones import (
    Tombstones,
    check_row_ids,
    check_rows_in_use,
    live_rows,
    renumbered,
)
from storage_formats.remote.objects import ObjectFolder
from storage_formats.remote.urls import (
    IndexLocation,
    hub_kind,
    index_location,
    is_url,
    local_path,
)
from storage_formats.threads import ordered_map
from storage_formats.writing.copying import RowCopier, ShardCopier
from storage_formats.writing.index_copy import (
    begin_remote_copy,
    copy_to_directory,
    file_contents,
    files_to_copy,
    is_data,
    manifest_bytes,
    what_is_lost,
)

_FILES_AT_ONCE = 8
# NumPy type of a SHA-256 in hexadecimal
_HASH = "S64"
# For each merged index, the result of a merge contains these members of the record in
# `index.json`.
_SHOWN = ("offset", "rows", "duplicates")


@dataclass(frozen=True)
class CopyResult:
    """The result of a compaction, a merge or a copy.

    Attributes:
        rows: number of rows of the written index, without deleted rows.
        shards: number of shards of the written index.
        snapshot: number of the current snapshot of the written index. For a copy, this
            is the number of the copied snapshot.
        seconds: wall time of this run.
        first_row: first row id of the rows that a compaction copied.
        removed: number of deleted rows that a compaction removed.
        row_map: path or URL of the Parquet file that maps old row ids to new row ids,
            after a compaction. None if the compaction had nothing to do.
        duplicates: number of rows that a merge deleted, because an earlier index has
            an image with the same bytes.
        inputs: for each merged index, its `index`, the `offset` added to its row ids,
            and its numbers of `rows` (including deleted rows) and `duplicates`.
        files: number of files of a copy, apart from `index.json`.
        copied_files: number of files that this run wrote. The other files were already
            in the destination.
        copied_bytes: total length in bytes of the files that this run wrote.

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
    inputs: Sequence[Json] = ()
    files: int = 0
    copied_files: int = 0
    copied_bytes: int = 0


@name_missing_extra("search")
def compact_index(
    index: IndexLocation,
    *,
    only_shards_with_deleted: bool = False,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> CopyResult:
    """Rewrite an index without its deleted rows, as `edje-index compact` does. The
    model is not needed.

    The copied rows get new ids. `storage_formats.TokenStore.translate` maps old row ids
    to new row ids. Column values that `set_columns` set are written to the new rows.
    Call the function again to resume a stopped compaction. The other arguments are
    those of `build_index`.

    If no row is deleted, only some shards are copied, and the rows of the other shards
    keep their ids. The copied shards are the shards with edited column values, the
    shards that are not full if their rows fit into fewer shards, and all shards with
    duplicates of rows of these shards.

    Args:
        index: directory of the index. The index can be read during the compaction.
        only_shards_with_deleted: True to copy only the shards with deleted rows, and
            the shards with duplicates of rows in these shards. The rows of the other
            shards keep their ids.

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
    with begin(index, "compact", request) as change:
        removed = change.index.manifest.snapshot.deleted_rows
        edit = compaction(change.index, only_shards_with_deleted)
        manifest = apply(change, edit, on_event, should_stop).manifest
    row_map = None
    if edit.moved is None:
        removed = 0
    else:
        path = manifest.row_maps[-1].file.path
        row_map = f"{str(index).rstrip('/')}/{path}"
    segments = manifest.spec.used_segments
    return CopyResult(
        rows=manifest.spec.used_rows,
        shards=manifest.spec.used_shards,
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
        first_row=segments[0 if edit.moved is None else -1].first_row,
        removed=removed,
        row_map=row_map,
    )


def compaction(index: CommittedIndex, only_shards_with_deleted: bool) -> Edit:
    """Return the edit that compacts an index. See `compact_index`."""
    spec = index.spec
    shards = list(spec.shard_numbers())
    if only_shards_with_deleted:
        row_shards = np.unique(index.deleted.row_ids // spec.shard_size)
        shards = _with_duplicates(index, row_shards.tolist())
    elif not len(index.deleted):
        # The number of rows of each shard that is not full, by shard number. Joining
        # these shards pays if their rows fit into fewer shards.
        small = {
            shard: rows
            for shard in shards
            if (rows := len(spec.shard_rows(shard))) < spec.shard_size
        }
        is_saving = -(-sum(small.values()) // spec.shard_size) < len(small)
        # Copy the shards with edited values, too, so that their new files contain these
        # values.
        chosen = {*index.edits.shards, *(small if is_saving else ())}
        shards = _with_duplicates(index, chosen)
    if not shards:
        return Edit(spec)
    return rewriting(index, shards, spec.shard_size)


def rewriting(
    index: CommittedIndex,
    shards: Sequence[int],
    shard_size: int,
) -> Edit:
    """Return the edit that moves all rows of `shards`, except deleted rows, to one new
    segment with `shard_size` rows per shard.

    Raises:
        UsageError: no row would be left, or the disk is too small.
    """
    manifest = index.manifest
    spec = manifest.spec
    moved = live_rows(index, shards)
    segments = list[Segment]()
    # Cut `shards` out of the segments of the index. Each run of remaining shards
    # becomes a segment.
    for segment in spec.used_segments:
        staying = np.setdiff1d(spec.segment_shards(segment), shards)
        for run in np.split(staying, np.flatnonzero(np.diff(staying) > 1) + 1):
            if len(run):
                start = int(run[0]) * spec.shard_size
                stop = min(segment.stop, (int(run[-1]) + 1) * spec.shard_size)
                segments.append(Segment(start, stop - start))
    first_row = next_first_row(manifest, shard_size)
    if len(moved):
        segments.append(Segment(first_row, len(moved)))
    if not segments:
        raise UsageError(
            f"cannot compact {index.root}: all its rows are deleted; delete the"
            " directory instead"
        )
    target = replaced(
        spec, rows=segments[-1].stop, segments=tuple(segments), shard_size=shard_size
    )
    identity = {
        "kind": "compact",
        "snapshot": asdict(manifest.snapshot),
        "tables": [table.to_json() for table in manifest.shard_tables],
        "shards": list(shards),
        "spec": asdict(target),
    }
    groups = recorded_sources(manifest)
    return Edit(
        target,
        details={
            "first_row": first_row,
            "rows": len(moved),
            "removed": len(index.deleted),
        },
        work=(
            copying(index, moved, index.layout, target, identity)
            if len(moved)
            else None
        ),
        moved=moved,
        settings=None if groups is None else with_sources(manifest, groups),
    )


def copying(
    source: CommittedIndex,
    row_ids: Ints,
    target: Layout,
    spec: IndexSpec,
    identity: Json,
) -> ShardWork:
    """Return the work that copies rows to the last segment of an index. The tasks run
    in this process.

    Args:
        source: index with the rows.
        row_ids: int64 [k], ids of the rows to copy, ascending.
        target: layout of the index to write to, which may be `source`.
        spec: shape of that index after the copy.
        identity: see `ShardWork`.

    Raises:
        UsageError: the disk is too small.
    """
    segment = spec.used_segments[-1]
    need = disk_need(replaced(spec, rows=segment.rows, segments=()))
    check_free_disk(target.root, need, f"a copy of {counted(segment.rows, 'row')}")
    copier = RowCopier(source, target, spec)
    first = segment.first_row
    renumber = partial(renumbered, row_ids, first)

    def copy(
        task: CopyTask,
        _: object,
        should_stop: ShouldStop,
    ) -> ShardReceipt:
        rows = spec.shard_rows(task.shard)
        of_shard = row_ids[rows.start - first : rows.stop - first]
        return copier.copy(task.shard, of_shard, renumber, task.plan, should_stop)

    return ShardWork(
        "copying",
        spec.segment_shards(segment),
        segment.rows,
        identity,
        CopyTask,
        lambda: copy,
        close=copier.close,
    )


@dataclass(frozen=True)
class CopyTask:
    """Task that copies rows to one shard.

    Attributes:
        shard: number of the shard to write.
        plan: fingerprint of the work, which the receipt records.
    """

    shard: int
    plan: str


def _with_duplicates(index: CommittedIndex, chosen: Iterable[int]) -> list[int]:
    """Return the shards `chosen` and all shards with a duplicate of one of their rows,
    ascending.

    Shards with duplicates of rows of the added shards are added, too, and so on.
    """
    spec = index.spec
    shards = set(chosen)
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


@name_missing_extra("search")
def copy_index(
    index: IndexLocation,
    out: IndexLocation,
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

    With `rows` or `where`, only the selected rows are copied, and `out` must be a
    directory. The copied rows are numbered from 0. No token is decoded, and the model
    is not needed. Call the function again with the same arguments to resume a stopped
    copy. The other arguments are those of `build_index`.

    Args:
        index: directory of the index, or its URL.
        out: directory of the copy, or its URL on an object store (`s3://`, `gs://` or
            `az://`) or on the Hugging Face Hub (`hf://datasets/OWNER/NAME`). A
            repository that does not exist is created, and is private.
        snapshot: number of the snapshot to copy; None copies the current snapshot.
        replace: True to replace an index at the URL `out`, and to remove the files of
            that index that are not files of the copy.
        rows: ids of the rows to copy.
        where: filter such as "licence is null", see `edje_index.search.where`. Rows
            that pass the filter are copied, too.

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
        live = live_rows(opened)
        passing = rows_passing(opened, where)
        chosen = live[np.isin(live, np.concatenate([requested, passing]))]
        if not len(chosen):
            raise UsageError(
                "no row is selected; choose other rows or another filter",
                parameter="where",
            )
        count = len(chosen)
        spec = replaced(spec, rows=count, segments=())
        identity = {
            "kind": "copy",
            "index": str(opened.location),
            "tables": [table.to_json() for table in manifest.shard_tables],
            "edits": [file.to_json() for file in manifest.edits],
            "rows": hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest(),
        }
        root = local_path(out)
        with begin_new(root, "copy", identity, on_event) as new:
            part = NewContents(
                spec,
                copying(opened, chosen, new.layout, spec, identity),
                manifest.model,
                with_sources(manifest, None),
                manifest.columns,
                origins=[opened],
                details={
                    "kind": "copy",
                    "name": opened.root.name,
                    "snapshot": manifest.snapshot.number,
                },
                edits=opened.edits.moved(partial(renumbered, chosen, 0)),
            )
            applied = apply(new, part, on_event, should_stop)
        files = [file for receipt in applied.receipts for file in receipt.files]
        copied = [
            file
            for receipt in applied.receipts
            if receipt.shard not in applied.earlier
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
                # `file_contents` compares a file with its checksum while reading it.
                # Most local files are read only for this check, and sent by path.
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
            root = local_path(out)
            notify = notifier(on_event)
            with (
                begin_new_index(root, "copy", request, notify=notify) as new,
                resumable(root),
            ):
                begin_index(root, spec)
                # A stopped copy keeps its files only if it has a receipt or a plan.
                # This copy writes no receipts, so it stores a plan.
                new.store_plan({"files": len(files)})
                copied = _copy_files(
                    files,
                    lambda file: copy_to_directory(opened, file, root),
                    on_event,
                    should_stop,
                )
                new.commit_copy(data)
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
    """Call `copy` for each entry, in several threads. Return the entries for which
    `copy` returned True, because the file was not yet at the destination.
    """
    copied = []
    done = 0
    until_stopped = itertools.takewhile(lambda _: not should_stop(), entries)
    with contextlib.closing(
        ordered_map(copy, until_stopped, _FILES_AT_ONCE, 2 * _FILES_AT_ONCE)
    ) as results:
        for done, (is_new, entry) in enumerate(zip(results, entries, strict=False), 1):
            if is_new:
                copied.append(entry)
            on_event(Progress("copying files", done, len(entries)))
    if done < len(entries):
        raise JobStopped(
            f"stopped after {done:,} of {len(entries):,} files; the copied files are"
            " kept"
        )
    return copied


@name_missing_extra("search")
def merge_indexes(
    indexes: Sequence[IndexLocation],
    out: IndexLocation,
    *,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> CopyResult:
    """Copy several indexes of the same model into a new index, as `edje-index merge`
    does. The model is not needed.

    The rows of the first index keep their ids. For each further index, a constant is
    added to its row ids. If an earlier index has an image with the same bytes, the row
    of the later image is deleted in the new index. Call the function again to resume a
    stopped merge. The other arguments are those of `build_index`.

    Args:
        indexes: directories of the indexes, in the order of their rows.
        out: directory of the new index.

    Raises:
        UsageError: an index does not exist, the indexes differ in model, block shape,
            shard size, precisions or frames per clip, or `out` is not free.
        JobStopped: the merge stopped early, or a file is damaged. Finished shards are
            kept.
        EdjeError: another process is writing the index at `out`.
        MissingExtraError: FAISS is not installed, but an index has a nearest-neighbour
            index.

    Examples:
        >>> import shutil
        >>> from edje_index import merge_indexes
        >>> _ = shutil.copytree("photos.edje", "copy.edje")
        >>> merge_indexes(["photos.edje", "copy.edje"], "all.edje").duplicates
        6
    """
    started = time.monotonic()
    paths = as_list(indexes, "indexes", "paths")
    opened = [CommittedIndex.open(local_path(each)) for each in paths]
    _refuse_different(opened)
    root = local_path(out)
    states = [
        {
            "root": str(each.root),
            "tables": [table.to_json() for table in each.manifest.shard_tables],
            "snapshot": asdict(each.manifest.snapshot),
        }
        for each in opened
    ]
    identity = {"kind": "merge", "indexes": states}
    with begin_new(root, "merge", identity, on_event) as change:
        copy = merging(opened, change.layout, identity, on_event)
        applied = apply(change, copy, on_event, should_stop)
    manifest = applied.manifest
    inputs = [
        {"index": str(each), **{name: values[name] for name in _SHOWN}}
        for each, values in zip(indexes, copy.details["inputs"], strict=True)
    ]
    return CopyResult(
        rows=manifest.counts.inputs - manifest.snapshot.deleted_rows,
        shards=len(applied.receipts),
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
        duplicates=sum(each["duplicates"] for each in inputs),
        inputs=inputs,
    )


def merging(
    indexes: Sequence[CommittedIndex],
    target: Layout,
    identity: Json,
    on_event: OnEvent,
) -> NewContents:
    """Return the contents of an index with all rows of `indexes`. See `merge_indexes`.

    Raises:
        UsageError: the new index would have too many columns.
    """
    manifests = [each.manifest for each in indexes]
    first = manifests[0].spec
    size = first.shard_size
    segments = list[Segment]()
    # For each shard of the new index, by its number: the copier, and the number that
    # the copied shard has in the old index
    origins: dict[int, tuple[ShardCopier, int]] = {}
    inputs = list[Json]()
    deleted = Tombstones()
    edits = list[pa.Table]()
    # Content hashes of the indexed rows of all indexes before the index `each`, sorted.
    # The last item is larger than any hash, so that every hash has a position.
    earlier_hashes: NDArray[np.bytes_] = np.array([b"\xff"], _HASH)
    on_event(StatusMessage("looking for duplicates"))
    for each in indexes:
        spec = each.spec
        old_first = spec.used_segments[0].first_row
        new_first = -(-segments[-1].stop // size) * size if segments else 0
        offset = new_first - old_first
        segments += [
            Segment(segment.first_row + offset, segment.rows)
            for segment in spec.used_segments
        ]
        copier = ShardCopier(each, offset, target)
        for shard in spec.shard_numbers():
            origins[shard + offset // size] = (copier, shard)
        repeated = [np.empty(0, np.int64)]
        contents = [earlier_hashes]
        for table in iter_rows(each, ["row_id", "content_hash", "status"]):
            digits = table["content_hash"].fill_null("").to_pylist()
            hashes = np.array(digits, _HASH)
            at_or_after = earlier_hashes[np.searchsorted(earlier_hashes, hashes)]
            is_known = (hashes == at_or_after) & (hashes != b"")
            repeated.append(table["row_id"].to_numpy()[is_known])
            contents.append(hashes[table["status"].to_numpy() == INDEXED])
        earlier_hashes = np.unique(np.concatenate(contents))
        rows = np.concatenate(repeated)
        edits.append(each.edits.moved(functools.partial(np.add, offset)))
        deleted_rows = np.concatenate([each.deleted.row_ids, rows])
        deleted = deleted.with_rows(deleted_rows + offset)
        inputs.append(
            {
                "name": each.root.name,
                "first_row": new_first,
                "offset": offset,
                "rows": spec.used_rows,
                "duplicates": len(rows),
            }
        )
    columns = merge_columns(*(manifest.columns for manifest in manifests))
    if len(columns) > MAX_COLUMNS:
        raise UsageError(
            f"the merged index would have {len(columns)} source columns; merge fewer"
            f" indexes, so that the index has at most {MAX_COLUMNS}"
        )
    groups = [recorded_sources(manifest) for manifest in manifests]
    all_groups = None
    if None not in groups:
        # Keep the order, and list each group once.
        all_groups = dict.fromkeys(
            group for of_index in groups for group in of_index or ()
        )
    settings = with_sources(manifests[0], all_groups)
    digests = [manifest.settings.get("inputs_digest") for manifest in manifests]
    if None not in digests:
        text = " ".join(map(str, digests))
        settings["inputs_digest"] = hashlib.sha256(text.encode()).hexdigest()

    spec = replaced(first, rows=segments[-1].stop, segments=tuple(segments))

    def copy(
        task: CopyTask,
        _: object,
        should_stop: ShouldStop,
    ) -> ShardReceipt:
        copier, shard = origins[task.shard]
        return copier.copy_shard(shard, task.plan)

    return NewContents(
        spec,
        ShardWork(
            "copying",
            list(origins),
            spec.used_rows,
            identity,
            CopyTask,
            lambda: copy,
        ),
        manifests[0].model,
        settings,
        tuple(sorted(columns, key=lambda column: column.name)),
        origins=indexes,
        details={"kind": "merge", "inputs": inputs},
        deleted=deleted,
        edits=pa.concat_tables(edits),
    )


def _refuse_different(indexes: Sequence[CommittedIndex]) -> None:
    """Raise UsageError unless the indexes can be merged: there must be at least two
    different indexes, and they must agree in their `_properties`.
    """
    if len(indexes) < 2:
        raise UsageError("a merge needs at least two indexes", parameter="indexes")
    roots = [index.root.resolve() for index in indexes]
    for position, root in enumerate(roots):
        if root in roots[:position]:
            raise UsageError(
                f"{indexes[position].root} is given twice; give each index only once",
                parameter="indexes",
            )
    first = indexes[0]
    expected = _properties(first)
    for other in indexes[1:]:
        properties = _properties(other)
        for name, left in expected.items():
            right = properties[name]
            if left != right:
                raise UsageError(
                    f"{first.root} and {other.root} cannot be merged: the {name} is"
                    f" {left} in {first.root} and {right} in {other.root}; add"
                    " or drop precisions first, or merge indexes of one model",
                    parameter="indexes",
                )


def _properties(index: CommittedIndex) -> dict[str, str]:
    """Return the properties that indexes must share to be merged, as texts by name."""
    manifest = index.manifest
    spec = manifest.spec
    offset = "none"
    if spec.offset is not None:
        names = ", ".join(sorted(spec.offset.precisions))
        offset = f"{spec.offset.crc32c:08x} of {names}"
    frames = "images only"
    if holds_clips(manifest):
        frames = str(manifest.settings["frames"])
    return {
        "encoder fingerprint": str(manifest.model["fingerprint"]),
        "block shape": " x ".join(map(str, spec.block_shape)),
        "width of embeddings": str(spec.embed_dim),
        "rows per shard": str(spec.shard_size),
        "precisions": ", ".join(sorted(spec.precisions)),
        "offset block": offset,
        "frames per clip": frames,
    }
