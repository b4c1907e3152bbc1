"""Compactions, copies, merges and erasures: write rows of existing indexes to new
files, without the model and without decoding tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edje_index.indexing.faiss_build import AnnRequest
from pipelines.jobs.changing import (
    Edit,
    ShardWork,
    apply,
    begin,
    notifier,
    resumable,
    rows_passing,
)
from pipelines.jobs.plan import (
    check_disk,
    recorded_sources,
    with_sources,
)
from pipelines.progress.events import (
    JobStopped,
    OnEvent,
    Progress,
    ShouldStop,
    StatusMessage,
    ignore,
    never,
)
from pipelines.progress.wording import counted
from storage_formats.arguments import as_list
from storage_formats.arrays import Ints
from storage_formats.atomic import Json
from storage_formats.change import begin_copy, remove_what_is_not_kept
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.file_check import FileEntry
from storage_formats.format.json_values import write_json
from storage_formats.format.layout import Segment
from storage_formats.format.manifest import (
    CommittedIndex,
    Counts,
    Manifest,
    named_files,
)
from storage_formats.format.offset import read_offset
from storage_formats.format.places import Place
from storage_formats.format.receipts import ShardReceipt, fingerprint
from storage_formats.format.rows import (
    INDEXED,
    count_rows,
    read_index_rows,
)
from storage_formats.format.source_columns import MAX_COLUMNS, CountedColumns
from storage_formats.format.tombstones import (
    check_row_ids,
    check_rows_in_use,
    live_rows,
    renumbered,
)
from storage_formats.remote.urls import (
    IndexLocation,
    index_location,
    is_url,
    local_path,
)
from storage_formats.threads import ordered_map
from storage_formats.writing.copying import ERASED, RowCopier

_FILES_AT_ONCE = 8


@dataclass(frozen=True)
class CopyResult:
    """The result of a compaction, a merge or a copy.

    Attributes:
        out: directory or URL of the written index.
        rows: number of rows of the written index, without deleted rows.
        shards: number of shards of the written index.
        snapshot: number of the copied snapshot; 0 for a merge.
        seconds: wall time of this run.
        removed: number of rows of the copied indexes that were not copied.
        duplicates: number of rows that a merge left out, because an earlier index has
            an image with the same bytes.
        inputs: for each merged index, its `index` and `name`, and its numbers of copied
            `rows` and of `duplicates`.
        files: number of data files of a copy, without `index.json` and `zarr.json`.
        copied_files: number of files that this run wrote. The other files were already
            in the destination.
        copied_bytes: total length in bytes of the files that this run wrote.

    Examples:
        >>> from edje_index import compact_index, copy_index, delete_rows
        >>> result = copy_index("photos.edje", "backup.edje")
        >>> result.snapshot, result.files
        (0, 6)
        >>> _ = delete_rows("backup.edje", rows=[0, 5])
        >>> result = compact_index("backup.edje", "dense.edje")
        >>> result.rows, result.removed
        (4, 2)
    """

    out: str
    rows: int
    shards: int
    snapshot: int
    seconds: float
    removed: int = 0
    duplicates: int = 0
    inputs: Sequence[Json] = ()
    files: int = 0
    copied_files: int = 0
    copied_bytes: int = 0


@name_missing_extra("search")
def compact_index(
    index: IndexLocation,
    out: IndexLocation | None = None,
    *,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> CopyResult:
    """Copy all rows of an index that are not deleted to a new index, as `edje-index
    compact` does. The model is not needed.

    The rows get the row ids from 0, in the same order. Call the function again to
    resume a stopped compaction. The other arguments are those of `build_index`.

    Args:
        index: directory of the index, or its URL. The index does not change.
        out: directory of the new index. None selects photos-compact.edje beside an
            index photos.edje.

    Raises:
        UsageError: there is no index at `index`, all rows are deleted, `out` is not
            free, or the disk is too small.
        JobStopped: the compaction stopped early, or a row is damaged. Finished shards
            are kept.
        EdjeError: another process is writing the index at `out`.
        MissingExtraError: FAISS is not installed, but the index has a nearest-neighbour
            index.

    Examples:
        >>> from edje_index import compact_index, delete_rows
        >>> _ = delete_rows("pages.edje", rows=[0, 1, 2])
        >>> compact_index("pages.edje", "dense.edje").rows
        27
    """
    out = out or compact_path(index)
    opened = CommittedIndex.open(index)
    return rewrite([(opened, live_rows(opened))], out, "compact", on_event, should_stop)


def compact_path(index: IndexLocation) -> Path:
    """Return the default directory of a compaction, beside the directory `index`."""
    path = local_path(index, advice="; give the directory of the new index, too")
    # An index may be given as "." or "..", which are no names.
    folder, name = os.path.split(os.path.abspath(path))
    return Path(folder, f"{name.removesuffix('.edje')}-compact.edje")


def rewrite(
    parts: Sequence[tuple[CommittedIndex, Ints]],
    out: IndexLocation,
    kind: str,
    on_event: OnEvent,
    should_stop: ShouldStop,
    details: Json | None = None,
) -> CopyResult:
    """Copy rows of one or more indexes to a new index. The rows of the first index get
    the row ids from 0, and those of each further index the row ids from the next
    multiple of the shard size.

    Args:
        parts: pairs (index, row ids of the rows to copy, int64 [k], ascending). The
            rows must not be deleted. The indexes must fit, see `merge_indexes`.
        out: directory of the new index.
        kind: kind of the change, "compact", "merge" or "copy". The new index has the
            sources of all `parts`, except after a "copy".
        details: members of `change` in `index.json`; None for the name and the snapshot
            of the first index.

    Raises:
        UsageError: there is no row to copy, `out` is not free, the new index would have
            too many columns, or the disk is too small.
    """
    started = time.monotonic()
    manifests = [index.manifest for index, _ in parts]
    first = manifests[0]
    size = first.spec.shard_size
    segments = list[Segment]()
    starts = list[int]()
    for _, row_ids in parts:
        start = -(-segments[-1].stop // size) * size if segments else 0
        starts.append(start)
        if len(row_ids):
            segments.append(Segment(start, len(row_ids)))
    if not segments:
        raise UsageError(
            f"nothing is left to copy: all rows of {parts[0][0].location} are deleted"
        )
    spec = replaced(
        first.spec,
        rows=segments[-1].stop,
        segments=tuple(segments) if len(segments) > 1 else (),
    )
    columns = CountedColumns(
        column for manifest in manifests for column in manifest.columns
    ).columns()
    if len(columns) > MAX_COLUMNS:
        raise UsageError(
            f"the new index would have {len(columns)} source columns; merge fewer"
            f" indexes, so that the index has at most {MAX_COLUMNS}"
        )
    groups = [None if kind == "copy" else recorded_sources(each) for each in manifests]
    sources = None
    if None not in groups:
        # Keep the order, and list each group once.
        sources = dict.fromkeys(group for listed in groups for group in listed or ())
    identity = {
        "kind": kind,
        "parts": [
            {
                "index": str(index.location),
                "tables": [table.to_json() for table in index.manifest.shard_tables],
                "files": [write_json(file) for file in index.manifest.rows_files],
                "rows": hashlib.sha256(row_ids.astype("<i8").tobytes()).hexdigest(),
            }
            for index, row_ids in parts
        ],
    }
    settings = with_sources(first, sources)
    if len(parts) > 1 and "inputs_digest" in settings:
        settings["inputs_digest"] = fingerprint(identity)
    if details is None:
        name = Path(str(parts[0][0].location)).name
        details = {"name": name, "snapshot": first.snapshot.number}
    # A precision is recorded with the longest chain of conversions of the parts.
    encoded_from: dict[str, tuple[str, ...]] = {}
    for each in manifests:
        for name, chain in each.encoded_from.items():
            encoded_from[name] = max(encoded_from.get(name, ()), chain, key=len)
    with begin(out, kind, identity, on_event=on_event, is_new=True) as change:
        what = f"a copy of {counted(spec.rows, 'row')}"
        check_disk(change.layout, spec, what=what)
        rows_of_shards: dict[int, tuple[RowCopier, Ints]] = {}
        shards = spec.shard_numbers()
        for (index, row_ids), start in zip(parts, starts, strict=True):
            renumber = partial(renumbered, row_ids, start)
            copier = RowCopier(index, change.layout, spec, renumber)
            for of_shard in np.split(row_ids, range(size, len(row_ids), size)):
                if len(of_shard):
                    rows_of_shards[next(shards)] = (copier, of_shard)
        edit = Edit(
            spec,
            {"kind": kind, **details},
            copying(rows_of_shards, identity),
            columns=columns,
            settings=settings,
            model=first.model,
            encoded_from=encoded_from,
            offset=read_offset(parts[0][0].place, spec),
            ann=_ann_request(manifests),
            removed=frozenset[bytes]().union(*(index.removed for index, _ in parts)),
        )
        applied = apply(change, edit, on_event, should_stop)
    copied = [
        file
        for receipt in applied.receipts
        if receipt.shard not in applied.earlier
        for file in receipt.files
    ]
    return CopyResult(
        out=str(out),
        rows=spec.used_rows,
        shards=spec.used_shards,
        snapshot=first.snapshot.number if len(parts) == 1 else 0,
        seconds=time.monotonic() - started,
        removed=sum(each.spec.used_rows for each in manifests) - spec.used_rows,
        files=sum(len(receipt.files) for receipt in applied.receipts),
        copied_files=len(copied),
        copied_bytes=sum(entry.bytes for entry in copied),
    )


def _ann_request(origins: Sequence[Manifest]) -> AnnRequest | None:
    """Return the request for the nearest-neighbour index of copied rows. Return None if
    none of the indexes from which they are copied has one.

    The target recall is the highest among the origins. If all origins have the same
    kind, the new index gets this kind. It gets the default kind for its own number of
    rows if the kinds differ, or if each origin has the default kind for its number of
    rows.

    Args:
        origins: manifests of the indexes from which the rows are copied.
    """
    requests = [AnnRequest.like(each) for each in origins if each.ann_files]
    if not requests:
        return None
    kind, *others = {request.ann for request in requests}
    recall = max(request.recall for request in requests)
    return AnnRequest("auto" if others else kind, recall)


def erasure(place: Place, index: CommittedIndex, edit: Edit) -> Edit:
    """Return `edit`, a deletion, as an edit that also removes the data of all deleted
    rows. The shards with these rows are written again, and all rows keep their ids.

    Raises:
        UsageError: the disk is too small.
    """
    manifest = index.manifest
    spec = manifest.spec
    deleted = index.deleted.with_rows(list(edit.deleted))
    source = index.undeleted()
    erased = read_index_rows(source, deleted.row_ids)
    erased = erased.filter(pc.not_equal(erased["reason"].fill_null(""), ERASED))
    if not len(erased):
        return edit
    shards = np.unique(erased["row_id"].to_numpy() // spec.shard_size).tolist()
    counts = count_rows(erased)
    failed = {name: -count for name, count in counts.failed.items()}
    columns = [
        replaced(each, values=each.values - len(erased) + erased[each.name].null_count)
        for each in manifest.columns
    ]
    rows_to_write = sum(len(spec.shard_rows(shard)) for shard in shards)
    written = replaced(spec, rows=rows_to_write, segments=())
    what = f"the new files of {counted(rows_to_write, 'row')}"
    check_disk(place, written, what=what)
    identity = {
        "kind": "erase",
        "deleted": hashlib.sha256(deleted.row_ids.astype("<i8").tobytes()).hexdigest(),
        "tables": [table.to_json() for table in manifest.shard_tables],
    }
    copier = RowCopier(source, place, spec, lambda row_ids: row_ids, deleted)
    rows_of_shards = {
        shard: (copier, np.array(spec.shard_rows(shard), np.int64)) for shard in shards
    }
    return replaced(
        edit,
        details={**edit.details, "erased": len(erased)},
        work=copying(rows_of_shards, identity),
        erases=True,
        counts=Counts(
            0,
            -counts.indexed,
            -counts.duplicates,
            {**failed, ERASED: len(erased)},
        ),
        columns=tuple(columns),
    )


def copying(
    rows_of_shards: Mapping[int, tuple[RowCopier, Ints]], identity: Json
) -> ShardWork:
    """Return the work that copies rows. The tasks run in this process.

    Args:
        rows_of_shards: for each shard to write, its copier, and the ids of the rows to
            copy.
        identity: JSON object with everything that determines the written bytes.
    """
    plan = fingerprint(identity)
    return ShardWork(
        "copying",
        list(rows_of_shards),
        sum(len(row_ids) for _, row_ids in rows_of_shards.values()),
        plan,
        lambda shard: CopyTask(shard, *rows_of_shards[shard], plan),
        lambda: CopyTask.run,
    )


@dataclass(frozen=True)
class CopyTask:
    """Task that copies the rows `row_ids` to one shard.

    Attributes:
        shard: number of the shard to write.
        plan: fingerprint of the work, which the receipt records.
    """

    shard: int
    copier: RowCopier
    row_ids: Ints
    plan: str

    def run(self, _: object, should_stop: ShouldStop) -> ShardReceipt:
        """Copy the rows. Return the receipt of the shard."""
        return self.copier.copy(self.shard, self.row_ids, self.plan, should_stop)


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
    """Copy a snapshot of an index between directories and object stores, or from a web
    server or the Hugging Face Hub to a directory, as `edje-index copy` does.

    With `rows` or `where`, only the selected rows are copied, and `out` must be a
    directory. The copied rows are numbered from 0. No token is decoded, and the model
    is not needed. Call the function again with the same arguments to resume a stopped
    copy. `edje_index.search.where` describes filters. The other arguments are those of
    `build_index`.

    Args:
        index: directory of the index, or its URL.
        out: directory of the copy, or its URL on an object store (`s3://`, `gs://` or
            `az://`).
        snapshot: number of the snapshot to copy; None copies the current snapshot.
        replace: replace any index at the URL `out`, and remove the files of that index
            that are not files of the copy.
        rows: id of a row to copy; repeatable.
        where: filter such as "licence is null". Rows that pass the filter are copied,
            too.

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
    opened = CommittedIndex.open(index, snapshot)
    manifest = opened.manifest
    target = index_location(out)
    spec = manifest.spec
    count = manifest.counts.inputs - manifest.snapshot.deleted_rows
    if len(rows) or where is not None:
        requested = check_row_ids(rows, spec.rows)
        check_rows_in_use(requested, spec)
        opened.deleted.refuse(requested)
        chosen = np.union1d(requested, rows_passing(opened, where))
        if not len(chosen):
            raise UsageError(
                "no row is selected; choose other rows or another filter",
                parameter="where",
            )
        table = read_index_rows(opened, chosen, ["duplicate_of"])
        originals = table["duplicate_of"].drop_null().to_numpy()
        left = np.setdiff1d(originals, chosen)
        if len(left):
            text = (
                "the copy has no tokens of duplicates whose original is not selected;"
                f" select {counted(len(left), 'original')} too, first row {left[0]}"
            )
            on_event(StatusMessage(text, is_warning=True))
        return rewrite([(opened, chosen)], out, "copy", on_event, should_stop)
    files = sorted(named_files(opened), key=lambda entry: entry.path)
    on_event(
        StatusMessage(
            f"copying {len(files):,} files of snapshot {manifest.snapshot.number}"
        )
    )
    with (
        begin_copy(
            opened, target, replace=replace, notify=notifier(on_event)
        ) as change,
        resumable(target),
    ):
        # A stopped copy keeps its files only if it has a receipt or a plan. This copy
        # writes no receipts, so it stores a plan.
        change.store_plan({"files": len(files)})
        copied = _copy_files(opened, files, change.layout, on_event, should_stop)
        change.commit(manifest)
        if replace or change.before is None:
            # An earlier index or a stopped copy of another snapshot has left these.
            place = change.layout
            place.remove(place.names(place.snapshots))
            remove_what_is_not_kept(place, tables=True, shards=True)
    return CopyResult(
        out=str(target),
        rows=count,
        shards=spec.used_shards,
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
        files=len(files),
        copied_files=len(copied),
        copied_bytes=sum(entry.bytes for entry in copied),
    )


def _copy_files(
    index: CommittedIndex,
    entries: Sequence[FileEntry],
    place: Place,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> list[FileEntry]:
    """Copy the files `entries` of `index` to `place`, in several threads. Return the
    entries of the files that were not yet there.
    """
    copied = []
    done = 0
    copy = partial(place.copy, index.place)
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

    All rows that are not deleted are copied, see `rewrite`. If an earlier index has an
    image with the same bytes, the row of the later image is left out. Call the function
    again to resume a stopped merge. The other arguments are those of `build_index`.

    Args:
        indexes: directories of the indexes, in the order of their rows.
        out: directory of the new index.

    Raises:
        UsageError: an index does not exist, the indexes differ in model, block shape,
            precisions or frames per clip, `out` is not free, or the disk is too small.
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
    paths = as_list(indexes, "indexes", "paths")
    opened = [CommittedIndex.open(local_path(each)) for each in paths]
    _refuse_different(opened)
    on_event(StatusMessage("looking for duplicates"))
    parts = list[tuple[CommittedIndex, Ints]]()
    inputs = list[Json]()
    # content hashes of the indexed rows of all indexes before the index `each`
    earlier = pa.chunked_array([], pa.string())
    for each in opened:
        table = read_index_rows(
            each, live_rows(each), ["row_id", "content_hash", "status"]
        )
        is_known = pc.is_in(table["content_hash"], earlier, skip_nulls=True)
        row_ids = table.filter(pc.invert(is_known))["row_id"].to_numpy()
        hashes = table.filter(pc.field("status") == INDEXED)["content_hash"]
        earlier = pa.chunked_array([*earlier.chunks, *hashes.chunks], pa.string())
        parts.append((each, row_ids))
        inputs.append(
            {
                "name": each.root.name,
                "rows": len(row_ids),
                "duplicates": len(table) - len(row_ids),
            }
        )
    details = {"inputs": inputs}
    result = rewrite(parts, out, "merge", on_event, should_stop, details)
    return replaced(
        result,
        duplicates=sum(each["duplicates"] for each in inputs),
        inputs=[
            {**each, "index": str(path)}
            for each, path in zip(inputs, paths, strict=True)
        ],
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


def _properties(index: CommittedIndex) -> dict[str, Any]:
    """Return the properties that indexes must share to be merged, by name."""
    manifest = index.manifest
    spec = manifest.spec
    offset = spec.offset
    return {
        "encoder fingerprint": manifest.model["fingerprint"],
        "block shape": spec.block_shape,
        "width of embeddings": spec.embed_dim,
        "precisions": sorted(spec.precisions),
        "offset block": offset and (offset.crc32c, sorted(offset.precisions)),
        "number of frames per clip": manifest.settings.get("frames"),
    }
