"""Appends and updates: encode new rows into new shards of an index, and commit one snapshot."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipelines.jobs.build import ignore, never, source_names
from pipelines.jobs.compare import NewInputs, compare_sources, find_failed
from pipelines.jobs.encode import encode_rows
from pipelines.jobs.plan import (
    BuildSettings,
    Plan,
    SourceGroup,
    check_inputs,
    holds_clips,
    model_record,
    recorded_sources,
    settings_of,
    stopping_on_full_disk,
    store_inputs,
    with_sources,
)
from pipelines.jobs.resources import check_disk, check_extension_memory, check_workers
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import Segment
from storage_formats.format.object_store import local_path

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from storage_formats.change import Change
    from storage_formats.format.manifest import CommittedIndex, Counts, Manifest
    from storage_formats.format.receipts import ShardReceipt


@dataclass(frozen=True)
class AppendResult:
    """The result of an append.

    Attributes:
        inputs: number of all inputs of the sources; the sum of indexed, duplicates and failed.
        indexed: number of inputs that were encoded.
        duplicates: number of inputs that were skipped, because the index or an earlier input has the same content.
        failed: number of inputs that could not be encoded; they have rows without tokens.
        failed_by_reason: number of failed inputs by reason.
        first_row: row id of the first new row; None if there is no new row.
        rows: number of new rows.
        shards: number of new shards.
        snapshot: number of the current snapshot.
        seconds: wall time of this run.

    Example:
        >>> from pipelines import append_index
        >>> result = append_index("photos.edje", "photos", engine="inline")
        >>> result.inputs, result.duplicates, result.rows, result.snapshot
        (6, 6, 0, 0)
    """

    inputs: int
    indexed: int
    duplicates: int
    failed: int
    failed_by_reason: dict[str, int]
    first_row: int | None
    rows: int
    shards: int
    snapshot: int
    seconds: float


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update.

    Attributes:
        inputs: number of inputs that were compared; the sum of unchanged, new, changed, duplicates and failed.
        unchanged: number of inputs whose row did not change. This includes failed inputs that have not changed.
        new: number of inputs with a new name that were encoded, or of failed inputs that were encoded at last.
        changed: number of inputs with new content that were encoded. The old rows of these inputs are deleted.
        duplicates: number of inputs that got no new row, because another row has the same content.
        failed: number of new and changed inputs that could not be encoded; they have rows without tokens.
        failed_by_reason: number of failed inputs by reason.
        vanished: number of rows whose input no longer exists. These rows are deleted.
        deleted: number of deleted rows: vanished rows, and old rows of changed or of failed inputs.
        first_row: row id of the first new row; None if there is no new row.
        rows: number of new rows.
        shards: number of new shards.
        snapshot: number of the current snapshot.
        seconds: wall time of this run.
        dry_run: True if the update was only tried and nothing was changed. `failed` then counts only inputs that cannot
            be read; other inputs may fail when they are decoded.

    Example:
        >>> from pathlib import Path
        >>> from pipelines import update_index
        >>> Path("photos/0.jpg").unlink()
        >>> result = update_index("photos.edje", engine="inline")
        >>> result.inputs, result.unchanged, result.vanished, result.snapshot
        (5, 5, 1, 1)
    """

    inputs: int
    unchanged: int
    new: int
    changed: int
    duplicates: int
    failed: int
    failed_by_reason: dict[str, int]
    vanished: int
    deleted: int
    first_row: int | None
    rows: int
    shards: int
    snapshot: int
    seconds: float
    dry_run: bool = False


@name_missing_extra("build")
def append_index(
    index: str | Path,
    sources: str | Path | Sequence[str | Path],
    *,
    model: str | Path | None = None,
    engine: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    address: str | None = None,
    column: str | None = None,
    max_failed: float | None = None,
    memory: int | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> AppendResult:
    """Add new images to an index, as `edje-index append` does.

    Images that the index already contains are skipped. Call the function again with the same arguments to resume a
    stopped append.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://` or `az://`).
            Its rows keep their ids.
        sources: directories, archives, lists of paths or image files, as in `build_index`.
        model: directory of the model bundle; None selects the bundle that built the index.
        engine: as in `build_index`.
        workers: as in `build_index`.
        address: as in `build_index`.
        column: as in `build_index`.
        max_failed: as in `build_index`.
        memory: as in `build_index`.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Raises:
        UsageError, ModelError: the request is invalid, or the index was not made by a build.
        JobStopped: the append stopped early. Finished shards are kept.
        FailedInputsError: no new image could be indexed, or too many images failed. The index is unchanged.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index.
        MissingExtraError: a package of the extra `build` is not installed.

    Example:
        >>> from pipelines import append_index
        >>> result = append_index("photos.edje", "photos", engine="inline")
        >>> result.indexed, result.duplicates
        (0, 6)
    """
    from storage_formats.change import begin_change
    from storage_formats.writing.working_copy import working_copy

    started, names = time.monotonic(), source_names(sources)
    with working_copy(index) as copy:
        group = source_group(names, column)
        with begin_change(copy.root, "append", {"sources": group.sources, "column": column}) as change:
            assert change.index is not None
            settings, info = settings_of_rows(change.index, group), bundle_of(change.index, model)
            workers = check_workers(settings, info, engine=engine, workers=workers, address=address, memory=memory)
            plan: Plan | None
            if change.plan is not None:
                plan = replace(Plan.from_json(change.plan), model=model_record(info))
                check_extension_memory(change.index.manifest, plan.rows, memory)
                check_inputs(change.layout.root, plan, change.receipts(plan.shards, plan.fingerprint))
                duplicates = plan.duplicates
            else:
                new = inputs_to_append(change.index, names, column, on_event, should_stop)
                plan, duplicates = plan_rows(change, new, settings, info, memory), new.duplicates
            receipts: list[ShardReceipt] = []
            if plan is not None:
                with stopping_on_full_disk(copy.root):
                    receipts = encode_rows(
                        change,
                        plan,
                        engine=engine,
                        workers=workers,
                        address=address,
                        max_failed=max_failed,
                        on_event=on_event,
                        should_stop=should_stop,
                    ).receipts
            groups = recorded_sources(change.index.manifest)
            if groups is not None:
                groups = tuple(dict.fromkeys((*groups, group)))
            manifest = _commit(change, plan, receipts, np.empty(0, np.int64), groups, memory, on_event)
    counts = _counts(receipts)
    return AppendResult(
        inputs=counts.inputs + duplicates,
        indexed=counts.indexed,
        duplicates=duplicates,
        failed=counts.failed_total,
        failed_by_reason=counts.failed,
        first_row=None if plan is None else plan.first_row,
        rows=counts.inputs,
        shards=len(receipts),
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
    )


@name_missing_extra("build")
def update_index(
    index: str | Path,
    sources: str | Path | Sequence[str | Path] = (),
    *,
    retry_failed: bool = False,
    dry_run: bool = False,
    max_vanished: float = 0.5,
    model: str | Path | None = None,
    engine: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    address: str | None = None,
    column: str | None = None,
    max_failed: float | None = None,
    memory: int | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> UpdateResult:
    """Add, replace and delete rows so that an index matches its sources, as `edje-index update` does.

    New and changed files get new rows. The old rows of changed files and the rows of missing files are deleted.
    Unchanged files are not encoded again. Call the function again with the same arguments to resume a stopped update:
    its finished shards count if the same inputs must be encoded.

    Args:
        index: directory of the index, or its URL on an object store (`s3://`, `gs://` or `az://`).
            Unchanged rows keep their ids.
        sources: all sources of the index, as in `build_index`. If empty, the sources recorded in the index are used.
        retry_failed: True to only look up the failed inputs by their names again. The sources are not listed. If every
            input fails again for the same reason, the index does not change.
        dry_run: return the changes without applying them.
        max_vanished: largest share of rows whose input may no longer exist, 0 to 1. If the share is larger, the update
            ends with an error.
        model: directory of the model bundle; None selects the bundle that built the index.
        engine: as in `build_index`.
        workers: as in `build_index`.
        address: as in `build_index`.
        column: as in `build_index`.
        max_failed: as in `build_index`.
        memory: as in `build_index`.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Raises:
        UsageError, ModelError: the request is invalid, or `sources` is empty and the index does not record its sources.
        JobStopped: the update stopped early. Finished shards are kept.
        TransientInputError: an input cannot be read for a temporary reason.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index, a source cannot be read, or too many files are missing or
            failed.
        MissingExtraError: a package of the extra `build` is not installed.

    Example:
        >>> from pipelines import update_index
        >>> result = update_index("photos.edje", engine="inline")
        >>> result.inputs, result.failed, result.vanished
        (6, 0, 0)
    """
    from storage_formats.change import begin_change
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.working_copy import working_copy

    started, names = time.monotonic(), source_names(sources)
    group = source_group(names, column) if names else None

    def compare(opened: CommittedIndex) -> tuple[Any, NewInputs]:
        if retry_failed:
            found = find_failed(opened)
            return found, found.new
        changes = compare_sources(opened, group, max_vanished, on_event, should_stop)
        return changes, changes.new

    if dry_run:
        with working_copy(index, read_only=True) as copy:
            opened = CommittedIndex.open(copy.root)
            changes, new = compare(opened)
        unread = Counter(ref.problem for ref in new.refs if ref.problem is not None)
        changed = sum(new.refs[position].problem is None for position in changes.changed)
        rows, shards = len(new.refs), -(-len(new.refs) // opened.manifest.spec.shard_size)
        failed_by_reason, indexed, first_row = dict(sorted(unread.items())), rows - unread.total(), None
        snapshot = opened.manifest.snapshot.number
    else:
        with (
            working_copy(index) as copy,
            begin_change(
                copy.root, "update", {"retry_failed": retry_failed}, notify=lambda text: on_event(StatusMessage(text))
            ) as change,
        ):
            assert change.index is not None
            changes, new = compare(change.index)
            plan = None
            receipts: list[ShardReceipt] = []
            if new.refs:
                settings = settings_of_rows(change.index, group or SourceGroup(()))
                info = bundle_of(change.index, model)
                workers = check_workers(settings, info, engine=engine, workers=workers, address=address, memory=memory)
                plan = plan_rows(change, new, settings, info, memory)
            elif change.plan is not None:
                change.start_again()
            if plan is not None:
                with stopping_on_full_disk(copy.root):
                    receipts = encode_rows(
                        change,
                        plan,
                        engine=engine,
                        workers=workers,
                        address=address,
                        max_failed=1.0 if retry_failed else max_failed,
                        needs_one=False,  # what failed is recorded, even if nothing else is new
                        on_event=on_event,
                        should_stop=should_stop,
                    ).receipts
            manifest = change.index.manifest
            if retry_failed and _failed_as_before(change, changes.reasons, new, receipts):
                change.abandon()
                plan, receipts = None, []
                changes = replace(changes, deleted=changes.deleted[:0], unchanged=changes.inputs)
            else:
                groups = recorded_sources(manifest) if group is None else (group,)
                manifest = _commit(change, plan, receipts, changes.deleted, groups, memory, on_event)
            counts = _counts(receipts)
            changed = _indexed_among(change, plan, changes.changed)
            rows, shards, failed_by_reason, indexed = counts.inputs, len(receipts), counts.failed, counts.indexed
            first_row, snapshot = None if plan is None else plan.first_row, manifest.snapshot.number
    return UpdateResult(
        inputs=changes.inputs,
        unchanged=changes.unchanged,
        new=indexed - changed,
        changed=changed,
        duplicates=new.duplicates,
        failed=sum(failed_by_reason.values()),
        failed_by_reason=failed_by_reason,
        vanished=changes.vanished,
        deleted=len(changes.deleted),
        first_row=first_row,
        rows=rows,
        shards=shards,
        snapshot=snapshot,
        seconds=time.monotonic() - started,
        dry_run=dry_run,
    )


def source_group(names: Sequence[str], column: str | None) -> SourceGroup:
    """Return sources as the index records them: as absolute paths."""
    from pipelines.sources.base import absolute_spec

    return SourceGroup(tuple(map(absolute_spec, names)), column)


def bundle_of(index: CommittedIndex, model: str | Path | None) -> BundleInfo:
    """Return the description of the bundle `model`, or of the bundle that built the index if `model` is None.

    Raises:
        ModelError: the bundle cannot be used, or another bundle built the index.
    """
    from edje_index.bundles.info import matching_bundle

    return matching_bundle(index, None if model is None else local_path(model))


def settings_of_rows(index: CommittedIndex, group: SourceGroup) -> BuildSettings:
    """Return the settings of new rows: those of the index, but with other sources, and without duplicates.

    Raises:
        UsageError: the index was not made by a build.
    """
    built, precisions = settings_of(index.root, index.manifest), index.manifest.spec.precisions
    return replace(built, sources=group.sources, column=group.column, dedupe=True, precisions=precisions)


def inputs_to_append(
    index: CommittedIndex, names: Sequence[str], column: str | None, on_event: OnEvent, should_stop: ShouldStop
) -> NewInputs:
    """List the inputs of the sources that `index` does not contain.

    Raises:
        UsageError: a source cannot be used.
        TransientInputError: an input cannot be read for a temporary reason.
        JobStopped: `should_stop()` returned True.
    """
    from pipelines.sources import count_ignored, digested, iter_all, mark_duplicates, open_sources
    from storage_formats.format.rows import iter_rows

    sources = open_sources(names, column, clips=holds_clips(index.manifest))
    digest = hashlib.sha256()
    listed = list(mark_duplicates(digested(iter_all(sources), digest, on_event, should_stop)))
    hashes = {ref.content_hash for ref in listed if ref.content_hash is not None}
    known: set[str] = set()
    for table in iter_rows(index, ["content_hash"]):
        known |= hashes.intersection(table["content_hash"].to_pylist())
    refs = [ref for ref in listed if ref.duplicate_of is None and ref.content_hash not in known]
    return NewInputs(refs, digest.hexdigest(), len(listed) - len(refs), count_ignored(sources))


def plan_rows(
    change: Change, new: NewInputs, settings: BuildSettings, info: BundleInfo, memory: int | None
) -> Plan | None:
    """Plan the rows of `new` in new shards, and store the plan. Return None if there are no rows.

    Finished shards of an earlier run of `change` count if its plan was the same; otherwise its files are removed.

    Raises:
        UsageError: the disk or the memory is too small.
        OSError: the plan cannot be written.
    """
    assert change.index is not None
    if not new.refs:
        return None
    manifest, spec = change.index.manifest, change.index.manifest.spec
    check_extension_memory(manifest, len(new.refs), memory)
    check_disk(change.layout.root, replace(spec, rows=len(new.refs), segments=()), memory)
    first_shard = max(spec.shards, manifest.snapshot.next_shard)
    segments = (*spec.used_segments, Segment(first_shard * spec.shard_size, len(new.refs)))
    plan = Plan(
        spec=replace(spec, rows=segments[-1].stop, segments=segments),
        model=model_record(info),
        settings=settings,
        inputs_digest=new.digest,
        duplicates=new.duplicates,
        ignored=new.ignored,
        input_checksums={},
        columns=(),
    )
    if change.plan is not None and Plan.from_json(change.plan).fingerprint != plan.fingerprint:
        change.start_again()
    lists = store_inputs(
        change.layout, new.refs, spec.shard_size, first_shard=first_shard, earlier_columns=manifest.columns
    )
    plan = replace(
        plan, ignored={**new.ignored, **lists.ignored}, input_checksums=lists.checksums, columns=lists.columns
    )
    change.store_plan(plan.to_json())
    return plan


def _commit(
    change: Change,
    plan: Plan | None,
    receipts: list[ShardReceipt],
    deleted: NDArray[np.int64],
    groups: Iterable[SourceGroup] | None,
    memory: int | None,
    on_event: OnEvent,
) -> Manifest:
    """Commit one snapshot with the new rows and without the rows `deleted`. Return the manifest of the snapshot.

    If there are no rows to add or delete, nothing is committed, and the current manifest is returned.
    """
    from edje_index.indexing.faiss_index import extend_ann
    from storage_formats.format.shard_table import write_shard_table
    from storage_formats.writing.publish import add_counts, check_receipts, write_tombstones

    assert change.index is not None
    index, manifest = change.index, change.index.manifest
    if plan is None and not len(deleted):
        return manifest
    details: dict[str, Any] = {}
    with stopping_on_full_disk(index.root):
        if plan is not None:
            check_receipts(receipts, plan.shards)
            on_event(StatusMessage("extending the nearest-neighbour index"))
            files = [(receipt.shard, file) for receipt in receipts for file in receipt.files]
            manifest = replace(
                manifest,
                spec=plan.spec,
                counts=add_counts(manifest.counts, _counts(receipts)),
                ann=extend_ann(change.layout, plan.spec, manifest.ann, memory=memory),
                further_tables=(*manifest.further_tables, write_shard_table(change.layout, files)),
                columns=plan.columns,
            )
            details = {"first_row": plan.first_row, "rows": plan.rows}
        if len(deleted):
            tombstones = index.deleted.with_rows(deleted)
            entry = write_tombstones(change.layout, tombstones)
            manifest = replace(
                manifest, snapshot=replace(manifest.snapshot, deleted=entry, deleted_rows=len(tombstones))
            )
            details["deleted"] = len(deleted)
        if groups is not None:
            manifest = with_sources(manifest, groups)
        return change.commit(manifest, details).manifest


def _counts(receipts: list[ShardReceipt]) -> Counts:
    from storage_formats.writing.publish import total_counts

    return total_counts(receipts)


def _failed_as_before(change: Change, reasons: Sequence[str], new: NewInputs, receipts: list[ShardReceipt]) -> bool:
    """Return True if every failed input failed again for the same reason as before."""
    from storage_formats.format.rows import read_shard_rows

    if any(receipt.indexed for receipt in receipts) or new.duplicates:
        return False
    tables = [read_shard_rows(change.layout, receipt.shard, ["reason"]) for receipt in receipts]
    return sorted(reasons) == sorted(reason for table in tables for reason in table["reason"].to_pylist())


def _indexed_among(change: Change, plan: Plan | None, positions: Sequence[int]) -> int:
    """Return how many of the new rows at `positions` were encoded."""
    from storage_formats.format.rows import INDEXED, read_rows

    if plan is None or not positions:
        return 0
    rows = read_rows(change.layout.root, [plan.first_row + position for position in positions], ["status"])
    return int(rows["status"].to_pylist().count(INDEXED))
