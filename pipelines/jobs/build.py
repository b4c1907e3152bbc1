"""Builds, appends and updates: encode new rows, and commit them."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.compute as pc

from edje_index.bundles.info import (
    BundleInfo,
    matching_bundle,
    read_bundle_info,
    read_bundle_offset,
)
from edje_index.indexing.faiss_build import AnnRequest
from pipelines.environment import free_disk
from pipelines.jobs.changing import (
    Applied,
    DryRun,
    Edit,
    NewContents,
    apply,
    begin,
    begin_new,
    next_first_row,
)
from pipelines.jobs.compare import SourceChanges, compare_sources, find_failed
from pipelines.jobs.encode import earlier_plan, encoding
from pipelines.jobs.plan import (
    BuildSettings,
    Plan,
    SourceGroup,
    default_shard_size,
    model_record,
    recorded_sources,
    refuse_differences,
    settings_of,
    store_inputs,
    with_sources,
)
from pipelines.jobs.resources import (
    Execution,
    check_ann_memory,
    check_disk,
    check_extension_memory,
    choose_workers,
    disk_need,
    usable_memory,
    workers_memory,
)
from pipelines.jobs.snapshots import edited_values
from pipelines.metadata import Ignored, python_values, source_values
from pipelines.progress.events import (
    Bottleneck,
    OnEvent,
    ShouldStop,
    StatusMessage,
    bottleneck,
    ignore,
    never,
)
from pipelines.progress.wording import by_reason, counted
from pipelines.sources import Listing, hash_and_mark_duplicates
from pipelines.sources.base import absolute_spec
from storage_formats.arguments import as_list, as_path, as_text
from storage_formats.atomic import Json
from storage_formats.change import IndexChange, finish_committed
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.content_hashes import known_contents
from storage_formats.format.layout import IndexSpec, Layout, Segment
from storage_formats.format.manifest import CommittedIndex, Counts, Manifest
from storage_formats.format.offset import offset_block
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import INDEXED, iter_rows, read_rows, read_shard_rows
from storage_formats.format.source_columns import caption_column
from storage_formats.remote.urls import IndexLocation, local_path
from storage_formats.verify import check_files
from storage_formats.writing.publish import total_counts

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class BuildResult:
    """The result of a build, an append or an update.

    Attributes:
        inputs: number of all inputs; the sum of indexed, duplicates, failed, unchanged
            and stay_deleted.
        indexed: number of inputs that were encoded.
        duplicates: number of inputs that are byte-identical to an earlier input or to a
            row of the index. After a build, they have rows. Otherwise they get no row.
        failed: number of inputs that could not be encoded; they have rows without
            tokens.
        failed_by_reason: number of failed inputs by reason.
        rows: number of new rows.
        shards: number of new shards.
        first_row: row id of the first new row; None if there is no new row.
        snapshot: number of the current snapshot.
        seconds: wall time of this run.
        images_per_second: rows that this run encoded per second after the listing; 0 if
            it encoded no row.
        bottleneck: stage in which the workers spent the most time; None if no times are
            known.
        stage_seconds: seconds per stage, summed over all new shards. In `wait` (for
            decoded images), `encode` (the model) and `write`, they are seconds of the
            workers. `read` and `decode` are sums over the decoding threads.
        truncated: number of indexed images that could be decoded only in part; None if
            an earlier run had finished the build.
        ignored: number of entries in the sources that are not inputs, by suffix or
            reason; None if an earlier run had finished the build.
        already_finished: True if an earlier run had finished the build.
        unchanged: number of inputs of an update whose row did not change. This includes
            failed inputs that have not changed.
        edited: number of unchanged inputs of an update whose columns changed in the
            sources.
        stay_deleted: number of inputs of an update that get no row, because their row
            was deleted by `delete_rows`.
        new: number of indexed inputs whose name is new, or that failed before.
        changed: number of indexed inputs whose content is new. The old rows of these
            inputs are deleted.
        vanished: number of rows whose input no longer exists. An update deletes these
            rows.
        deleted: number of deleted rows: vanished rows, and old rows of changed or of
            failed inputs.
        dry_run: True if nothing was changed. `failed` then counts only inputs that
            cannot be read; other inputs may fail when they are decoded.
        estimate: for a build that is only tried, its `workers` and `finished_shards`,
            and in bytes, `disk_bytes` and `memory_bytes` by purpose, `free_disk_bytes`
            and `free_memory_bytes`.

    Examples:
        >>> from pathlib import Path
        >>> from edje_index import build_index, update_index
        >>> result = build_index("photos", "new.edje", "model", engine="inline")
        >>> result.inputs == result.indexed + result.duplicates + result.failed == 6
        True
        >>> Path("photos/0.jpg").unlink()
        >>> result = update_index("new.edje", engine="inline")
        >>> result.inputs, result.unchanged, result.vanished, result.snapshot
        (5, 5, 1, 1)
    """

    inputs: int
    indexed: int
    duplicates: int
    failed: int
    failed_by_reason: dict[str, int]
    rows: int
    shards: int
    first_row: int | None
    snapshot: int
    seconds: float
    images_per_second: float = 0.0
    bottleneck: Bottleneck | None = None
    stage_seconds: Mapping[str, float] | None = None
    truncated: int | None = None
    ignored: Mapping[str, int] | None = None
    already_finished: bool = False
    unchanged: int = 0
    edited: int = 0
    stay_deleted: int = 0
    new: int = 0
    changed: int = 0
    vanished: int = 0
    deleted: int = 0
    dry_run: bool = False
    estimate: Json | None = None


def result_of(
    applied: Applied,
    plan: Plan | None,
    duplicates: int,
    started: float,
    counts: Counts | None = None,
) -> BuildResult:
    """Return the result of a change that encoded the rows of `plan`. `duplicates` is
    the number of inputs without a row, and `counts` that of the rows.
    """
    receipts = applied.receipts
    if counts is None:
        counts = total_counts(receipts)
    stage_seconds: Counter[str] = Counter()
    for receipt in receipts:
        stage_seconds.update(receipt.seconds)
    return BuildResult(
        inputs=counts.inputs + duplicates,
        indexed=counts.indexed,
        duplicates=counts.duplicates + duplicates,
        failed=counts.failed_total,
        failed_by_reason=counts.failed,
        rows=counts.inputs,
        shards=len(receipts),
        first_row=None if plan is None else plan.first_row,
        snapshot=applied.manifest.snapshot.number,
        seconds=time.monotonic() - started,
        images_per_second=applied.speed,
        bottleneck=bottleneck(stage_seconds),
        stage_seconds=dict(stage_seconds),
        truncated=sum(receipt.truncated for receipt in receipts),
        ignored=None if plan is None else plan.ignored,
        new=counts.indexed,
    )


@name_missing_extra("build")
def build_index(
    sources: IndexLocation | Sequence[IndexLocation],
    out: IndexLocation,
    model: IndexLocation,
    *,
    engine: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    threads: int | None = None,
    shard_size: int | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    precisions: Sequence[str] = ("bf16",),
    dedupe: bool = False,
    column: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_pixels: int | None = None,
    truncated: Literal["fail", "load"] = "fail",
    frames: int | None = None,
    max_failed: float | None = None,
    address: str | None = None,
    memory: int | None = None,
    dry_run: bool = False,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> BuildResult:
    """Build an index of images, as `edje-index build` does.

    Call the function again with the same arguments to resume a stopped build. If the
    index is finished, the function only checks that the arguments, the inputs and the
    lengths of the files are the same.

    Args:
        sources: one or several directories, archives, lists of paths or image files.
            The rows of the index have the order of the sources.
        out: directory of the index.
        model: directory of the model bundle.
        engine: "ray" or "inline".
        workers: number of worker processes; None derives the number from the hardware.
        threads: number of CPU threads per worker; None derives the number from the
            hardware. A resumed build keeps the number of the first run.
        shard_size: number of rows per shard; None is 1,024, and up to 16,384 if there
            are at least 1,000 shards of this size.
        batch_size: number of images per forward pass; None is 8 on a CPU and 128
            on cuda. A resumed build keeps the number of the first run.
        device: device of the encoder: "auto", "cpu", "cuda" or, with the engine inline,
            "cuda:N". "auto" is cuda if this machine, or the cluster at `address`, has
            a GPU.
        dtype: data type of the encoder's matrix products: "float32", "bfloat16" or
            "auto". "auto" is bfloat16 on cuda, and on a CPU if the CPU of the process
            that plans the build has bfloat16 instructions. None is bfloat16 on cuda and
            float32 on every CPU. A resumed build keeps the type of the first run.
        precisions: precisions of the stored tokens.
        dedupe: True to encode byte-identical inputs only once.
        column: name of the path column in lists of paths; None selects the first column
            with a usual name.
        include: patterns in the syntax of .gitignore, for example "/2024/" or "*.jpg".
            Only inputs that match one are indexed; empty for all. An input is named by
            its path in its source.
        exclude: patterns of inputs that are not indexed. `append_index` and
            `update_index` keep the patterns of the index.
        max_pixels: maximum number of pixels of an image; larger images become failed
            rows. None selects `edje_index.images.decode.DEFAULT_MAX_PIXELS`.
        truncated: "fail" makes a truncated image a failed row. "load" indexes the
            readable part of the image.
        frames: number of frames per clip. Video files are then inputs, too. None
            indexes images only.
        max_failed: maximum share of failed inputs, 0 to 1. If more inputs fail, the
            build ends with an error. None allows 1 % of the inputs, but at least 20
            inputs.
        address: address of the Ray cluster to join; None starts Ray on this machine.
        memory: memory in bytes that the workers on this machine and the
            nearest-neighbour index may need; None is the free memory. The build is
            planned for this limit, which the operating system does not enforce. The
            kind of nearest-neighbour index depends on the limit. The tokens do not.
        dry_run: list the sources, and return what the build would do and need. Nothing
            is written.
        on_event: called with each progress event.
        should_stop: called often; the build stops once `should_stop()` returns True.

    Raises:
        UsageError, ModelError: the request is invalid, or differs from that of the
            index at `out`.
        JobStopped: the build stopped early. Finished shards are kept.
        EdjeError: another process is changing the index, no input could be indexed, or
            a larger share failed than `max_failed` allows.
        MissingExtraError: a package of the extra `build` is not installed.

    Examples:
        >>> from edje_index import build_index
        >>> result = build_index(
        ...     "photos", "new.edje", "model", engine="inline", precisions=["fp8"]
        ... )
        >>> result.inputs, result.indexed, result.failed
        (6, 6, 0)
    """
    started = time.monotonic()
    specs = source_names(sources)
    out = local_path(out)
    if any(os.path.realpath(spec) == os.path.realpath(out) for spec in specs):
        raise UsageError(
            f"{out} is also one of the sources; choose another output directory",
            parameter="out",
        )
    info = read_bundle_info(local_path(model))
    requested: Json = {
        "sources": specs,
        "column": column,
        "include": tuple(include),
        "exclude": tuple(exclude),
        "dedupe": dedupe,
        "shard_size": shard_size,
        "precisions": precisions,
        "max_pixels": max_pixels,
        "batch_size": batch_size,
        "threads": threads,
        "device": device,
        "dtype": dtype,
        "truncated": truncated,
        "frames": frames,
        "cluster": address if engine == "ray" else None,
    }
    if Layout(out).manifest.exists():
        manifest = check_finished(out, info, requested, should_stop)
        result = result_of(Applied(manifest), None, 0, started, manifest.counts)
        return replace(
            result,
            shards=manifest.spec.shards,
            first_row=0,
            truncated=None,
            already_finished=True,
            dry_run=dry_run,
        )
    with begin_new(out, "build", None, on_event, dry_run=dry_run) as change:

        def is_wanted(plan: Plan) -> bool:
            settings = BuildSettings.choose(plan.settings, **requested)
            fingerprint = plan.model["fingerprint"]
            return (settings, info.encoder_fingerprint) == (plan.settings, fingerprint)

        plan = earlier_plan(change, info, on_event, is_wanted)
        settings = BuildSettings.choose(
            None if plan is None else plan.settings, **requested
        )
        if plan is not None:
            refuse_differences(out, plan.model, plan.settings, info, settings)
        execution = Execution(engine, workers, address, memory, max_failed)
        execution = choose_workers(settings, info, execution)
        offset = read_bundle_offset(info)
        failed: dict[str, int] = {}
        if plan is not None:
            # another limit than that of the first run may hold
            check_ann_memory(plan.spec, memory)
        else:
            listing = Listing(settings.open_sources(), on_event, should_stop)
            refs = hash_and_mark_duplicates(listing) if dedupe else listing
            stored = store_inputs(change, refs, settings.shard_size)
            if shard_size is None:
                size = default_shard_size(stored.rows, stored.row_bytes)
                settings = replace(settings, shard_size=size)
            failed = stored.failed
            ignored = {**listing.ignored, **stored.ignored}
            if not stored.rows:
                kinds = by_reason(ignored)
                reason = "there are no files"
                if kinds:
                    reason = f"none of the files is an image ({kinds})"
                raise UsageError(
                    f"there is nothing to index in {', '.join(settings.sources)}:"
                    f" {reason}",
                    parameter="sources",
                )
            block = None
            if offset is not None:
                block = offset_block(offset, settings.precisions)
            spec = IndexSpec(
                stored.rows,
                settings.shard_size,
                info.block_shape,
                info.embed_dim,
                settings.precisions,
                offset=block,
            )
            plan = Plan(
                spec,
                model_record(info),
                settings,
                listing.digest,
                stored.duplicates,
                ignored,
                stored.checksums,
                stored.columns,
            )
            check_ann_memory(spec, memory)
            check_disk(out, spec, memory)
            captions = (
                "no captions: the sources have no column captions, caption or text"
            )
            for name in caption_column(plan.columns):
                captions = f"captions are in the column {name}"
            on_event(StatusMessage(captions))
            change.store_plan(plan.to_json())
        if isinstance(change, DryRun):
            finished = change.receipts(plan.shards, plan.fingerprint)
            failures = sum(failed.values())
            return BuildResult(
                inputs=plan.rows,
                indexed=plan.rows - plan.duplicates - failures,
                duplicates=plan.duplicates,
                failed=failures,
                failed_by_reason=failed,
                rows=plan.rows,
                shards=len(plan.shards),
                first_row=0,
                snapshot=0,
                seconds=time.monotonic() - started,
                ignored=plan.ignored,
                dry_run=True,
                estimate={
                    "workers": execution.workers,
                    "finished_shards": len(finished),
                    "disk_bytes": disk_need(plan.spec, memory),
                    "free_disk_bytes": free_disk(out),
                    "memory_bytes": workers_memory(execution.workers, settings, info),
                    "free_memory_bytes": usable_memory(memory),
                },
            )
        contents = NewContents(
            plan.spec,
            encoding(change, plan, execution, on_event),
            plan.model,
            {**asdict(plan.settings), "inputs_digest": plan.inputs_digest},
            plan.columns,
            ann=AnnRequest(memory=memory),
            offset=offset,
        )
        applied = apply(change, contents, on_event, should_stop)
    return result_of(applied, plan, 0, started)


def source_names(sources: IndexLocation | Sequence[IndexLocation]) -> tuple[str, ...]:
    """Return the names of one or several sources."""
    return (
        (str(sources),) if isinstance(sources, str | Path) else tuple(map(str, sources))
    )


def check_finished(
    out: Path,
    info: BundleInfo,
    requested: Json,
    should_stop: ShouldStop,
) -> Manifest:
    """Check that a request asks for the finished index at `out`, and that its files and
    its sources have not changed.

    Args:
        requested: the requested settings, arguments of `BuildSettings.choose`.

    Returns:
        The manifest of the index.

    Raises:
        UsageError: the model, the settings or the inputs differ.
    """
    finish_committed(out)
    index = CommittedIndex.open(out)
    stored = settings_of(out, index.manifest)
    settings = BuildSettings.choose(stored, **requested)
    refuse_differences(out, index.manifest.model, stored, info, settings)
    check_files(index, only_lengths=True)
    listing = Listing(settings.open_sources(), ignore, should_stop)
    deque(listing, maxlen=0)
    if listing.digest != index.manifest.settings.get("inputs_digest"):
        before = counted(index.manifest.counts.inputs, "input")
        raise UsageError(
            f"the sources have changed since {out} was built: they had {before} and now"
            f" have {listing.inputs}, with other names, sizes or metadata. Update the"
            " index, or choose another output directory",
            parameter="sources",
        )
    return index.manifest


@name_missing_extra("build")
def append_index(
    index: IndexLocation,
    sources: IndexLocation | Sequence[IndexLocation],
    *,
    model: IndexLocation | None = None,
    engine: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    address: str | None = None,
    column: str | None = None,
    max_failed: float | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> BuildResult:
    """Add new images to an index, as `edje-index append` does.

    Images that the index already contains are skipped. Call the function again with the
    same arguments to resume a stopped append. The other arguments are those of
    `build_index`.

    Args:
        index: directory of the index. Its rows keep their ids.
        sources: directories, archives, lists of paths or image files, as in
            `build_index`.
        model: directory of the model bundle; None selects the bundle that built the
            index.

    Raises:
        UsageError, ModelError: the request is invalid, or the index was not made by a
            build.
        JobStopped: the append stopped early. Finished shards are kept.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index, no new image could be indexed,
            or too many failed. The index is unchanged.
        MissingExtraError: a package of the extra `build` is not installed.

    Examples:
        >>> from edje_index import append_index
        >>> result = append_index("photos.edje", "photos", engine="inline")
        >>> result.indexed, result.duplicates, result.rows, result.snapshot
        (0, 6, 0, 0)
    """
    started = time.monotonic()
    group = _source_group(sources, column)
    request = {"sources": group.sources, "column": column}
    execution = Execution(engine, workers, address, max_failed=max_failed)
    with begin(index, "append", request) as change:
        settings, info = _settings_and_bundle(change.index, group, model)
        execution = choose_workers(settings, info, execution)
        plan = earlier_plan(change, info, on_event)
        if plan is None:
            listing = Listing(settings.open_sources(), on_event, should_stop)
            listed = list(hash_and_mark_duplicates(listing))
            hashes = {
                ref.content_hash for ref in listed if ref.content_hash is not None
            }
            known = known_contents(change.index, hashes)
            refs = [
                ref
                for ref in listed
                if ref.duplicate_of is None and ref.content_hash not in known
            ]
            duplicates = len(listed) - len(refs)
            changes = SourceChanges(
                refs, listing.digest, len(listed), duplicates, listing.ignored
            )
            if refs:
                plan = _plan_rows(change, changes, settings, info)
        else:
            duplicates = plan.duplicates
            check_extension_memory(change.index.manifest, plan.rows)
        groups = recorded_sources(change.index.manifest)
        if groups is not None:
            groups = tuple(dict.fromkeys((*groups, group)))
        edit = _new_rows(change, plan, groups)
        if plan is not None:
            edit = replace(edit, work=encoding(change, plan, execution, on_event))
        applied = apply(change, edit, on_event, should_stop)
    return result_of(applied, plan, duplicates, started)


@name_missing_extra("build")
def update_index(
    index: IndexLocation,
    sources: IndexLocation | Sequence[IndexLocation] = (),
    *,
    retry_failed: bool = False,
    restore: bool = False,
    dry_run: bool = False,
    max_vanished: float = 0.5,
    model: IndexLocation | None = None,
    engine: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    address: str | None = None,
    column: str | None = None,
    max_failed: float | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> BuildResult:
    """Add, replace and delete rows so that an index matches its sources, as `edje-index
    update` does.

    New and changed files get new rows. The old rows of changed files and the rows of
    missing files are deleted. Unchanged files are not encoded again. Call the function
    again with the same arguments to resume a stopped update: its finished shards count
    if the same inputs must be encoded. The other arguments are those of `build_index`.

    Args:
        index: directory of the index. Unchanged rows keep their ids.
        sources: all sources of the index, as in `build_index`. If empty, the sources
            recorded in the index are used.
        retry_failed: True to only look up the failed inputs by their names again. The
            sources are not listed. If every input fails again for the same reason, the
            index does not change.
        restore: True to index files again whose rows were deleted by `delete_rows`.
            Otherwise a file stays deleted until its name or its content changes.
        dry_run: return the changes without applying them.
        max_vanished: largest share of rows whose input may no longer exist, 0 to 1. If
            the share is larger, the update ends with an error.
        model: directory of the model bundle; None selects the bundle that built the
            index.

    Raises:
        UsageError, ModelError: the request is invalid, or `sources` is empty and the
            index does not record its sources.
        JobStopped: the update stopped early. Finished shards are kept.
        TransientInputError: an input cannot be read for a temporary reason.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index, a source cannot be read, or
            too many files are missing or failed.
        MissingExtraError: a package of the extra `build` is not installed.

    Examples:
        >>> from edje_index import update_index
        >>> result = update_index("photos.edje", engine="inline")
        >>> result.inputs, result.failed, result.vanished
        (6, 0, 0)
    """
    started = time.monotonic()
    group = _source_group(sources, column) if source_names(sources) else None

    def compare(opened: CommittedIndex) -> SourceChanges:
        nonlocal group
        if retry_failed:
            return find_failed(opened)
        if group is not None and column is None:
            # a list that the index records keeps its column
            for each in recorded_sources(opened.manifest) or ():
                if {*each.sources} & {*group.sources}:
                    group = replace(group, column=each.column)
        return compare_sources(
            opened, group, max_vanished, on_event, should_stop, restore=restore
        )

    plan = None
    changed = 0
    request = {"retry_failed": retry_failed}
    with begin(index, "update", request, dry_run=dry_run) as change:
        manifest = change.index.manifest
        changes = compare(change.index)
        work = None
        if changes.refs and not dry_run:
            settings, info = _settings_and_bundle(
                change.index, group or SourceGroup(()), model
            )
            # What failed is recorded, even if nothing else is new.
            limit = 1.0 if retry_failed else max_failed
            execution = Execution(engine, workers, address, max_failed=limit)
            execution = choose_workers(settings, info, execution)
            plan = _plan_rows(change, changes, settings, info)
            work = encoding(change, plan, execution, on_event, needs_one=False)
        elif change.plan is not None:
            change.start_again()
        groups = recorded_sources(manifest) if group is None else (group,)
        edit = _new_rows(change, plan, groups, changes.deleted)
        columns = manifest.columns if plan is None else plan.columns
        lines, columns = edited_values(change.index, changes.values, columns)
        edit = replace(
            edit,
            work=work,
            edits=lines,
            columns=columns,
            restored=change.index.edits.removed if restore else (),
        )
        if retry_failed and not changes.duplicates:
            edit = replace(edit, failed_before=Counter(changes.reasons))
        applied = apply(change, edit, on_event, should_stop)
        shards = len(applied.receipts)
        counts = total_counts(applied.receipts)
        if dry_run:
            refs = changes.refs
            failed = Counter(ref.problem for ref in refs if ref.problem is not None)
            counts = Counts(len(refs), len(refs) - failed.total(), 0, dict(failed))
            shards = -(-len(refs) // manifest.spec.shard_size)
            positions = {*changes.changed}
            changed = sum(
                ref.problem is None and position in positions
                for position, ref in enumerate(refs)
            )
        elif retry_failed and applied.manifest is manifest:
            # every failed input failed again for the same reason
            applied = Applied(manifest)
            plan = None
            shards = 0
            counts = Counts(0, 0, 0)
            changes = replace(changes, deleted=(), unchanged=changes.inputs)
        elif plan is not None and changes.changed:
            row_ids = [plan.first_row + position for position in changes.changed]
            statuses = read_rows(change.layout.root, row_ids, ["status"])["status"]
            changed = statuses.to_pylist().count(INDEXED)
    return replace(
        result_of(applied, plan, changes.duplicates, started, counts),
        inputs=changes.inputs,
        shards=shards,
        unchanged=changes.unchanged,
        edited=len(changes.values),
        stay_deleted=changes.stay_deleted,
        new=counts.indexed - changed,
        changed=changed,
        vanished=changes.vanished,
        deleted=len(changes.deleted),
        dry_run=dry_run,
    )


@name_missing_extra("build")
def add_images(
    index: IndexLocation,
    images: Sequence[str | Path | bytes | Image],
    uris: Sequence[str],
    columns: Sequence[Json] | None = None,
    *,
    model: IndexLocation | None = None,
    on_event: OnEvent = ignore,
) -> BuildResult:
    """Add images to an index under names that you choose, or replace the rows of these
    names, in one commit.

    Each image gets a new row, also if the index holds an equal image. The older rows of
    its uri are deleted. If an image cannot be indexed, nothing changes.

    The index then records no sources, because a source does not list these rows:
    `update_index` needs all sources by name, and deletes the rows that were added here.
    Thumbnails need uris that are paths or URLs of the images.

    Args:
        index: directory of the index.
        images: paths, bytes of image files, or PIL images.
        uris: names of the rows, one per image.
        columns: values of columns by name, one mapping per image, for example captions;
            see docs/sources.md. None adds no values.
        model: directory of the model bundle; None selects the bundle that built the
            index.
        on_event: as in `build_index`.

    Raises:
        UsageError, ModelError: an argument is invalid, an image cannot be indexed, or
            the index was not made by a build.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index.
        MissingExtraError: a package of the extra `build` is not installed.

    Examples:
        >>> from pipelines import add_images
        >>> columns = [{"captions": ["a dog"]}]
        >>> result = add_images("photos.edje", ["photos/0.jpg"], ["my-id"], columns)
        >>> again = add_images("photos.edje", ["photos/1.jpg"], ["my-id"])
        >>> result.new, result.changed, again.changed
        (1, 0, 1)
    """
    import PIL.Image
    from PIL import ImageOps

    from edje_index.inputs.refs import InputRef, rows_digest

    started = time.monotonic()
    images = as_list(images, "images", "images")
    uris = [as_text(uri, "uris") for uri in as_list(uris, "uris", "texts")]
    values = (
        [{}] * len(images)
        if columns is None
        else as_list(columns, "columns", "mappings")
    )
    different = len(set(uris))
    mappings = sum(isinstance(row, Mapping) for row in values)
    if (
        not len(images) == len(uris) == different == len(values) == mappings
        or not images
    ):
        raise UsageError(
            f"got {len(images)} images, {len(uris)} uris ({different} different) and"
            f" {mappings} mappings of columns: give one different uri and one mapping"
            " per image",
            parameter="uris",
        )
    with (
        tempfile.TemporaryDirectory(prefix="edje-add-") as folder,
        begin(index, "add") as change,
    ):
        # its images are removed with the folder, so no later run could finish it
        change.abandon()
        refs = []
        ignored = Ignored()
        for number, (image, uri, row) in enumerate(
            zip(images, uris, values, strict=True)
        ):
            path = Path(folder, str(number))
            try:
                if isinstance(image, PIL.Image.Image):
                    ImageOps.exif_transpose(image).save(path, "PNG", compress_level=1)
                else:
                    path.write_bytes(
                        image
                        if isinstance(image, bytes)
                        else as_path(image, "images").read_bytes()
                    )
            except (OSError, SyntaxError, ValueError) as error:
                raise UsageError(
                    f"the image of {uri} cannot be read: {error}", parameter="images"
                ) from error
            refs.append(
                InputRef(
                    uri,
                    os.fsencode(path),
                    metadata=source_values(python_values(row), ignored),
                )
            )
        settings, info = _settings_and_bundle(change.index, SourceGroup(()), model)
        execution = choose_workers(settings, info, Execution("inline", max_failed=1.0))
        changes = SourceChanges(refs, rows_digest(refs), len(refs), 0, ignored)
        plan = _plan_rows(change, changes, settings, info)
        work = encoding(change, plan, execution, on_event, needs_one=False)

        def check(receipts: Sequence[ShardReceipt]) -> None:
            for row in read_shard_rows(
                change.layout, receipts[-1].shard, ["uri", "reason", "detail"]
            ).to_pylist():
                if row["reason"] is not None:
                    raise UsageError(
                        f"the image of {row['uri']} cannot be indexed: {row['reason']}"
                        f" ({row['detail']}); nothing was added",
                        parameter="images",
                    )

        deleted = []
        names = pa.array(uris, pa.string())
        for table in iter_rows(change.index, ["row_id", "uri"]):
            deleted += table.filter(pc.is_in(table["uri"], names)).to_pylist()
        edit = _new_rows(change, plan, None, [row["row_id"] for row in deleted])
        edit = replace(edit, work=replace(work, check=check))
        applied = apply(change, edit, on_event, never)
    changed = len({row["uri"] for row in deleted})
    return replace(
        result_of(applied, plan, 0, started),
        new=len(uris) - changed,
        changed=changed,
        deleted=len(deleted),
    )


def _source_group(
    sources: IndexLocation | Sequence[IndexLocation], column: str | None
) -> SourceGroup:
    """Return sources as the index records them: as absolute paths."""
    return SourceGroup(tuple(map(absolute_spec, source_names(sources))), column)


def _settings_and_bundle(
    index: CommittedIndex,
    group: SourceGroup,
    model: IndexLocation | None,
) -> tuple[BuildSettings, BundleInfo]:
    """Return the settings of new rows, those of `index` with other sources and
    without duplicates, and the bundle.
    """
    built = settings_of(index.root, index.manifest)
    precisions = index.manifest.spec.precisions
    settings = replace(
        built,
        sources=group.sources,
        column=group.column,
        dedupe=True,
        precisions=precisions,
    )
    return settings, matching_bundle(
        index, None if model is None else local_path(model)
    )


def _plan_rows(
    change: IndexChange | DryRun,
    changes: SourceChanges,
    settings: BuildSettings,
    info: BundleInfo,
) -> Plan:
    """Plan the new rows of `changes` in new shards, and store the plan.

    Finished shards of an earlier run of `change` count if its plan was the same;
    otherwise its files are removed.
    """
    manifest = change.index.manifest
    spec = manifest.spec
    rows = len(changes.refs)
    check_extension_memory(manifest, rows)
    check_disk(change.layout.root, replace(spec, rows=rows, segments=()))
    first_row = next_first_row(manifest, spec.shard_size)
    segments = (*spec.used_segments, Segment(first_row, rows))
    spec = replace(spec, rows=segments[-1].stop, segments=segments)
    plan = Plan(
        spec,
        model_record(info),
        settings,
        changes.digest,
        changes.duplicates,
        changes.ignored,
        {},
    )
    if (
        change.plan is not None
        and Plan.from_json(change.plan).fingerprint != plan.fingerprint
    ):
        change.start_again()
    stored = store_inputs(
        change,
        changes.refs,
        spec.shard_size,
        first_shard=first_row // spec.shard_size,
        earlier_columns=manifest.columns,
    )
    plan = replace(
        plan,
        ignored={**changes.ignored, **stored.ignored},
        input_checksums=stored.checksums,
        columns=stored.columns,
    )
    change.store_plan(plan.to_json())
    return plan


def _new_rows(
    change: IndexChange | DryRun,
    plan: Plan | None,
    groups: Iterable[SourceGroup] | None,
    deleted: Sequence[int] = (),
) -> Edit:
    """Return the edit that adds the rows of `plan` and deletes the rows `deleted`. Its
    work is missing.

    The index records the sources `groups` of all rows; None if they are unknown.
    """
    manifest = change.index.manifest
    edit = Edit(manifest.spec, deleted=deleted, settings=with_sources(manifest, groups))
    details: Json = {}
    if plan is not None:
        details = {"first_row": plan.first_row, "rows": plan.rows}
        edit = replace(edit, spec=plan.spec, columns=plan.columns)
    if len(deleted):
        details["deleted"] = len(deleted)
    return replace(edit, details=details)
