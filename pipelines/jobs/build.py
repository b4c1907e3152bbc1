"""The build of an index from images."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from edje_index.bundles.info import (
    BundleInfo,
    read_bundle_info,
    read_bundle_offset,
)
from edje_index.indexing.faiss_build import AnnRequest
from pipelines.environment import free_disk
from pipelines.jobs.changing import (
    Applied,
    Edit,
    apply,
    begin_new,
)
from pipelines.jobs.encode import earlier_plan, encoding
from pipelines.jobs.plan import (
    BuildSettings,
    Plan,
    default_shard_size,
    model_record,
    refuse_differences,
    settings_of,
    store_inputs,
)
from pipelines.jobs.resources import (
    Execution,
    check_ann_memory,
    check_disk,
    choose_workers,
    disk_need,
    usable_memory,
    workers_memory,
)
from pipelines.progress.events import (
    Bottleneck,
    OnEvent,
    ShouldStop,
    StatusMessage,
    bottleneck,
    busy_shares,
    ignore,
    never,
)
from pipelines.progress.wording import by_reason, counted
from pipelines.sources import Listing, hash_and_mark_duplicates
from storage_formats.atomic import Json
from storage_formats.change import finish_committed
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import Counts, Manifest
from storage_formats.format.offset import offset_block
from storage_formats.format.remote import index_exists, open_index
from storage_formats.format.source_columns import caption_columns
from storage_formats.remote.urls import (
    IndexLocation,
    index_location,
    is_url,
    local_path,
)
from storage_formats.verify import check_files
from storage_formats.writing.publish import total_counts


@dataclass(frozen=True)
class BuildResult:
    """The result of a build, an append or an update.

    Attributes:
        inputs: number of all inputs: the sum of `indexed`, `duplicates`, `failed`,
            `unchanged` and `stay_deleted`.
        indexed: number of inputs that were encoded.
        duplicates: number of inputs that are byte-identical to an earlier input or to a
            row of the index. In a build, duplicates get rows without tokens. In an
            append or an update, they get no rows.
        failed: number of inputs that could not be encoded. They have rows without
            tokens. In an update, this includes the inputs that failed before.
        failed_by_reason: number of failed inputs by reason.
        rows: number of new rows.
        shards: number of new shards.
        first_row: row id of the first new row; None if there is no new row.
        snapshot: number of the current snapshot.
        seconds: wall time of this run.
        images_per_second: number of rows that this run encoded per second, not counting
            the time of the listing; 0 if it encoded no row.
        bottleneck: stage in which the workers spent the most time; None if no times are
            known.
        stage_seconds: seconds per stage, summed over all new shards. A worker spends
            its time in three stages: `wait` for decoded images, `encode` with the
            model, and `write`. Its helpers run at the same time: `read` and `decode`
            are the sums of their seconds, and `helpers` is the sum of the seconds that
            they had.
        busy: shares of the time in which the helpers and the model were busy, with the
            keys `helpers` and `model`; empty if no times are known.
        truncated: number of indexed images that could be decoded only in part; None if
            an earlier run had finished the build.
        ignored: number of entries in the sources that are not inputs, by suffix or
            reason; None if an earlier run had finished the build.
        already_finished: True if an earlier run had finished the build.
        unchanged: number of inputs of an update whose row was kept, except failed
            inputs.
        edited: number of unchanged inputs of an update whose columns changed in the
            sources.
        moved: number of unchanged inputs of an update that have another name than
            before. Their rows have the new names.
        stay_deleted: number of inputs of an update that get no row, because their row
            was deleted by `delete_rows`.
        new: number of indexed inputs whose name is new, or that failed before and were
            tried again with `retry_failed`.
        changed: number of indexed inputs whose name had a row with other content. The
            old rows of these inputs are deleted.
        vanished: number of rows whose input no longer exists. An update deletes these
            rows.
        deleted: number of deleted rows: vanished rows, and the old rows of inputs that
            got a new row or are duplicates.
        dry_run: True for a dry run, which changes nothing. `failed` then counts only
            the inputs that cannot be read. Further inputs may fail when they are
            decoded.
        estimate: for a dry run of a build, a mapping with `workers`,
            `finished_shards`, `disk_bytes` and `memory_bytes` (bytes needed, each a
            mapping by purpose), `free_disk_bytes` and `free_memory_bytes`. None
            otherwise.

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
    busy: Mapping[str, float] = field(default_factory=dict)
    truncated: int | None = None
    ignored: Mapping[str, int] | None = None
    already_finished: bool = False
    unchanged: int = 0
    edited: int = 0
    moved: int = 0
    stay_deleted: int = 0
    new: int = 0
    changed: int = 0
    vanished: int = 0
    deleted: int = 0
    dry_run: bool = False
    estimate: Json | None = None


def result_of(
    applied: Applied | None,
    plan: Plan | None,
    duplicates: int,
    started: float,
    counts: Counts | None = None,
) -> BuildResult:
    """Return the result of a build, an append or an update.

    Args:
        applied: what the change did; None for a dry run of a build.
        plan: plan of the new rows; None if there are no new rows.
        duplicates: number of duplicates that get no row.
        started: time at which the run started, as returned by `time.monotonic`.
        counts: counts of the new rows; None sums the counts of the receipts.
    """
    receipts = () if applied is None else applied.receipts
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
        snapshot=0 if applied is None else applied.manifest.snapshot.number,
        seconds=time.monotonic() - started,
        images_per_second=0.0 if applied is None else applied.speed,
        bottleneck=bottleneck(stage_seconds),
        stage_seconds=dict(stage_seconds),
        busy=busy_shares(stage_seconds),
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
    helpers: int | None = None,
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
    index is finished, the function encodes nothing. It only checks that the arguments,
    the inputs and the lengths of the index files have not changed.

    Args:
        sources: one or several directories, archives, lists of paths or image files.
            The rows of the index have the order of the sources.
        out: directory of the new index, or its URL (s3://, gs://, az://). For a URL,
            no file system is shared: workers put their shards on the object store.
        model: directory of the model bundle. On the command line, also a model of
            'model get', such as edje (the trained model of the paper's authors, from
            the Hugging Face Hub) or demo (a small model, without the Hub).
        engine: execution engine: Ray workers (ray) or this process (inline).
        workers: number of worker processes, which share the GPUs. None selects twice
            the number of GPUs, or the number of CPUs divided by `threads`, but only as
            many as the memory has room for.
        helpers: number of helper processes per shard being encoded, which read, decode
            and resize images; 0 prepares them in the process of the worker. None
            selects a number from the hardware.
        threads: number of CPU threads per worker. A resumed build keeps the number of
            the first run. None selects the number of CPUs, at most 4.
        shard_size: number of rows per shard. None selects 1024, and more from about 2
            million rows on, but at most 16384.
        batch_size: number of images per forward pass. A resumed build keeps the number
            of the first run. None selects 8 on a CPU and 128 on cuda.
        device: device that runs the model. auto is cuda if this machine, or the cluster
            at `address`, has a GPU. With the engine inline, Python also takes "cuda:N".
        dtype: data type of the model's matrix products: float32, bfloat16 or auto. auto
            is bfloat16 on cuda, and on a CPU if the CPU of the process that plans the
            build has bfloat16 instructions. A resumed build keeps the type of the first
            run. None selects bfloat16 on cuda and float32 on every CPU.
        precisions: precision of the stored tokens; repeatable.
        dedupe: True to encode byte-identical images only once.
        column: column with the images or image paths, if a source is a table. None
            selects a column of images, or the first of path, image, file, uri, ....
        include: use only the inputs that match a pattern as in .gitignore, for example
            "/2024/" or "*.jpg"; repeatable. The patterns are compared with the path of
            an input in its source. If there are none, all inputs are used.
        exclude: leave out the inputs that match a pattern as in .gitignore; repeatable.
            Appends and updates use the patterns of the index.
        max_pixels: maximum number of pixels of an image; larger images become failed
            rows. None selects 89,478,485.
        truncated: what to do with a truncated image: fail makes a failed row, load
            indexes the readable part of the image.
        frames: also index videos: encode this number of evenly spaced frames of each
            video. None is for images only.
        max_failed: stop if more than this share of the images fails, 0 to 1. None
            selects 0.01, but at least 20 images.
        address: Ray cluster to join. None selects a new Ray on this machine.
        memory: memory in bytes that the workers on this machine and the
            nearest-neighbour index may need; None is the free memory. The number of
            workers and the kind of nearest-neighbour index are chosen for this limit.
            The operating system does not enforce the limit, and the tokens do not
            depend on it.
        dry_run: show the work, and the disk space and memory that it needs, and write
            nothing.
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
    out = index_location(out)
    if not is_url(out) and any(
        os.path.realpath(spec) == os.path.realpath(out) for spec in specs
    ):
        raise UsageError(
            f"{out} is also one of the sources; choose another output directory",
            parameter="out",
        )
    execution = Execution(engine, workers, helpers, address, memory, max_failed)
    info = read_bundle_info(local_path(model))
    requested: Json = {
        "sources": specs,
        "column": column,
        "include": tuple(include),
        "exclude": tuple(exclude),
        "dedupe": bool(dedupe),
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
    if index_exists(out):
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
        execution = choose_workers(settings, info, execution)
        offset = read_bundle_offset(info)
        failed: dict[str, int] = {}
        if plan is not None:
            # The first run may have had another memory limit.
            check_ann_memory(plan.spec, memory)
        else:
            listing = Listing(settings.open_sources(), on_event, should_stop)
            refs = hash_and_mark_duplicates(listing) if dedupe else listing
            stored = store_inputs(change, refs, settings.shard_size)
            if shard_size is None:
                size = default_shard_size(stored.rows, stored.row_bytes)
                settings = replace(settings, shard_size=size)
            failed = dict(stored.failed)
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
                stored.columns(),
            )
            check_ann_memory(spec, memory)
            check_disk(change.layout, spec, memory)
            names = " and the column ".join(caption_columns(plan.columns))
            captions = (
                "no captions: the sources have no texts in a column captions, caption"
                " or text"
            )
            if names:
                captions = f"captions are in the column {names}"
            on_event(StatusMessage(captions))
            change.store_plan(plan.to_json())
        if dry_run:
            finished = change.receipts(plan.shards, plan.fingerprint)
            failures = sum(failed.values())
            counts = Counts(
                plan.rows,
                plan.rows - plan.duplicates - failures,
                plan.duplicates,
                failed,
            )
            return replace(
                result_of(None, plan, 0, started, counts),
                shards=len(plan.shards),
                dry_run=True,
                estimate={
                    "workers": execution.workers,
                    "finished_shards": len(finished),
                    "disk_bytes": disk_need(plan.spec, memory),
                    "free_disk_bytes": free_disk(change.layout.root),
                    "memory_bytes": workers_memory(execution.workers, settings, info),
                    "free_memory_bytes": usable_memory(memory),
                },
            )
        edit = Edit(
            plan.spec,
            work=encoding(change, plan, execution, on_event),
            model=plan.model,
            settings={**asdict(plan.settings), "inputs_digest": plan.inputs_digest},
            columns=plan.columns,
            ann=AnnRequest(memory=memory),
            offset=offset,
        )
        applied = apply(change, edit, on_event, should_stop)
    return result_of(applied, plan, 0, started)


def source_names(sources: IndexLocation | Sequence[IndexLocation]) -> tuple[str, ...]:
    """Return the names of one or several sources."""
    return (
        (str(sources),) if isinstance(sources, str | Path) else tuple(map(str, sources))
    )


def check_finished(
    out: IndexLocation,
    info: BundleInfo,
    requested: Json,
    should_stop: ShouldStop,
) -> Manifest:
    """Check that the index at `out`, which is finished, has the requested model and
    settings, and that its files and its sources have not changed.

    Args:
        requested: requested settings: keyword arguments of `BuildSettings.choose`.

    Returns:
        The manifest of the index.

    Raises:
        UsageError: the model, the settings or the inputs differ.
        CorruptIndexError: a file of the index is missing or has another length.
    """
    if not is_url(out):
        finish_committed(out)
    index = open_index(out)
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
