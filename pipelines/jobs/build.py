"""The build of an index from images, and the encoding of new rows for every job, with
one task per shard.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edje_index.bundles.info import (
    BundleInfo,
    read_bundle_info,
    read_bundle_offset,
)
from edje_index.indexing.faiss_build import AnnRequest
from edje_index.indexing.kept_batches import kept_rows
from edje_index.progress import ShardProgress
from pipelines.engines.base import machine_gpus, open_engine
from pipelines.environment import cuda_devices, free_disk
from pipelines.jobs.changing import (
    Applied,
    Edit,
    FailedInputsError,
    ShardWork,
    apply,
    begin,
)
from pipelines.jobs.plan import (
    SHARDS_PER_GPU,
    BuildSettings,
    Execution,
    Plan,
    check_ann_memory,
    check_disk,
    choose_workers,
    default_shard_size,
    disk_need,
    model_record,
    refuse_differences,
    settings_of,
    store_inputs,
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
from storage_formats.cgroups import available_memory
from storage_formats.change import Change, finish_committed
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.journal import how_to_discard
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import (
    CommittedIndex,
    Counts,
    Manifest,
    index_exists,
)
from storage_formats.format.offset import offset_block
from storage_formats.format.places import Place, reading_place
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import FAILED, read_staged_rows
from storage_formats.format.source_columns import caption_columns
from storage_formats.remote.urls import (
    IndexLocation,
    index_location,
    is_url,
    local_path,
)
from storage_formats.threads import usable_cpus
from storage_formats.verify import check_files
from storage_formats.writing.publish import total_counts

if TYPE_CHECKING:
    from edje_index.indexing.shard_encoding import ShardTask
    from edje_index.inputs.helpers import Helpers, Threads


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
    execution = Execution(engine, workers, helpers, address, max_failed)
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
    with begin(out, "build", on_event=on_event, is_new=True, dry_run=dry_run) as change:

        def is_wanted(plan: Plan) -> bool:
            settings = BuildSettings.choose(plan.settings, **requested)
            fingerprint = plan.model["fingerprint"]
            return (settings, info.encoder_fingerprint) == (plan.settings, fingerprint)

        plan = earlier_plan(change, info, on_event, is_wanted)
        if plan is None:
            settings = BuildSettings.choose(None, **requested)
        else:
            refuse_differences(out, plan.model, plan.settings, info, requested)
            settings = plan.settings
        execution = choose_workers(settings, info, execution)
        offset = read_bundle_offset(info)
        failed: dict[str, int] = {}
        if plan is not None:
            check_ann_memory(plan.spec)
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
            check_ann_memory(spec)
            check_disk(change.layout, spec)
            names = " and the column ".join(caption_columns(plan.columns))
            captions = f"captions are in the column {names}"
            if not names:
                captions = (
                    "no captions: the sources have no texts in a column captions,"
                    " caption or text; if a table or a .jsonl file holds them, give it"
                    " as the source, in place of its folder"
                )
            on_event(StatusMessage(captions))
            change.store_plan(plan.to_json())
        if dry_run:
            finished = change.receipts(plan.shards, plan.fingerprint)
            failures = sum(failed.values())
            unread = sum(failed[reason] for reason in failed.keys() - UNDECODED)
            if unread > (allowed := _allowed_failures(plan, execution)):
                raise _too_many_failures(plan, unread, allowed, plan.rows, failed)
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
                    "disk_bytes": disk_need(plan.spec),
                    "free_disk_bytes": free_disk(change.layout.root),
                    "memory_bytes": workers_memory(execution.workers, settings, info),
                    "free_memory_bytes": available_memory(),
                },
            )
        edit = Edit(
            plan.spec,
            work=encoding(change, plan, execution, on_event),
            model=plan.model,
            settings={**asdict(plan.settings), "inputs_digest": plan.inputs_digest},
            columns=plan.columns,
            ann=AnnRequest(),
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
    finish_committed(reading_place(out))
    index = CommittedIndex.open(out)
    settings = settings_of(out, index.manifest)
    refuse_differences(out, index.manifest.model, settings, info, requested)
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


DEFAULT_SHARE = 0.01
ALWAYS_ALLOWED = 20
"""Number of inputs that may fail by default in a collection of any size. In a small
collection, `DEFAULT_SHARE` alone would allow hardly any damaged file.
"""

UNDECODED = frozenset({"unsupported-image", "unsupported-video"})
"""Reasons of failed inputs that do not count towards the limit of failures. The file
may be sound, but this installation cannot decode its format.
"""

_NAMED_FAILURES = 3
_MAX_HELPERS = 32
# By default, no helper processes are started for at most this number of rows.
_FEW_ROWS = 64


def encoding(
    change: Change,
    plan: Plan,
    execution: Execution,
    on_event: OnEvent,
    check_all: Callable[[Sequence[ShardReceipt]], None] | None = None,
) -> ShardWork:
    """Return the work that encodes the rows of `plan`.

    The work ends with FailedInputsError if too many inputs fail. Inputs of formats that
    this installation does not decode do not count as failed.

    Args:
        execution: the result of `choose_workers`.
        check_all: function that is called with the receipts of all shards, and raises
            an error to end the work. None ends the work with FailedInputsError if no
            input can be indexed. A change of a finished index is then abandoned.
    """
    from edje_index.indexing.shard_encoding import ShardTask

    layout = change.layout
    settings = plan.settings
    fingerprint = plan.fingerprint
    allowed = _allowed_failures(plan, execution)
    failed = Counter[str]()

    def check(receipts: Sequence[ShardReceipt]) -> None:
        failed.update(receipts[-1].failed)
        number = sum(failed[reason] for reason in failed.keys() - UNDECODED)
        is_last = len(receipts) == len(plan.shards)
        if is_last and number and plan.duplicates:
            number += _failed_duplicates(layout, receipts)
        if number > allowed:
            kept = (
                f". The first are {_first_failures(layout, receipts)}. Finished and"
                f" kept: {len(receipts):,} of {counted(len(plan.shards), 'shard')}"
            )
            done = sum(each.rows for each in receipts)
            raise _too_many_failures(plan, number, allowed, done, failed, kept)
        if not is_last:
            return
        undecoded = Counter(
            row["detail"]
            for row in failed_rows(layout, receipts)
            if row["reason"] in UNDECODED
        )
        if undecoded:
            text = (
                f"{counted(undecoded.total(), 'file')} in a format that this"
                f" installation does not decode: {by_reason(undecoded)}"
            )
            on_event(StatusMessage(text, is_warning=True))
        if check_all is not None:
            check_all(receipts)
        elif not any(receipt.indexed for receipt in receipts):
            if change.before is not None:
                change.abandon()
            raise FailedInputsError(
                f"none of the {counted(failed.total(), 'input')} could be indexed"
                f" ({by_reason(failed)}). The first are"
                f" {_first_failures(layout, receipts)}; correct"
                f" {', '.join(settings.sources)}, and run the command again"
            )

    engine = execution.engine
    workers = execution.workers
    device = settings.device
    cpus = settings.threads
    per_gpu = SHARDS_PER_GPU
    helpers = execution.helpers
    if helpers is None and plan.rows <= _FEW_ROWS:
        helpers = 0
    if settings.is_cuda:
        # Reserve one CPU in Ray. The worker computes its number of helpers from the
        # CPUs of its machine, see `ShardWorker`.
        cpus = 1
        if engine == "inline":
            workers = SHARDS_PER_GPU
        else:
            # A Ray worker sees only the GPU that Ray assigns to it, so the device needs
            # no number.
            device = "cuda"
            if execution.address is None and workers is not None:
                per_gpu = max(per_gpu, math.ceil(workers / cuda_devices()))
    return ShardWork(
        "indexing",
        plan.shards,
        plan.rows,
        fingerprint,
        make_task=lambda shard: ShardTask(
            root=str(layout.location),
            shard=shard,
            spec=plan.spec,
            plan=fingerprint,
            batch_size=settings.batch_size,
            decoding=settings.decoding,
            columns=plan.columns,
        ),
        make_worker=functools.partial(
            ShardWorker,
            str(plan.model["bundle"]),
            settings,
            device,
            helpers,
            workers if engine == "inline" and workers else 1,
            per_gpu,
        ),
        engine=open_engine(
            engine,
            workers,
            cpus=cpus,
            gpus=1 / per_gpu if settings.is_cuda else 0.0,
            address=execution.address,
            lock=None if layout.remote else layout.lock,
        ),
        shows_failed=True,
        described={
            "workers": execution.workers,
            "duplicates": plan.duplicates,
            "ignored": plan.ignored,
        },
        check=check,
    )


def earlier_plan(
    change: Change,
    info: BundleInfo,
    on_event: OnEvent,
    is_wanted: Callable[[Plan], bool] = lambda plan: True,
) -> Plan | None:
    """Return the stored plan of an earlier run of `change`, to be resumed; None if this
    run must make a new plan.

    The stored plan is removed if it has finished shards but none of their inputs was
    indexed, or if it has no finished rows and `is_wanted` returns False for it.

    Args:
        info: the bundle with which this run encodes.
        is_wanted: returns True for a plan that fits the request of this run.
    """
    if change.plan is None:
        return None
    plan = Plan.parse(change.plan)
    receipts = change.receipts(plan.shards, plan.fingerprint)
    is_useless = not (
        any(receipt.indexed for receipt in receipts.values())
        or kept_rows(change.layout)
    )
    if is_useless and (receipts or not is_wanted(plan)):
        change.start_again()
        return None
    place = change.layout
    # At a URL, the time of the journal is not known.
    for source in plan.settings.sources if place.remote is None else ():
        planned = place.journal.stat().st_mtime
        if os.path.isfile(source) and os.path.getmtime(source) > planned:
            text = (
                f"{source} has changed since this command began; the command goes on"
                " with the inputs that it listed then. Update the index when it is"
                f" finished, or {how_to_discard(change.layout)[0]} to start over"
            )
            on_event(StatusMessage(text, is_warning=True))
    if plan.model["fingerprint"] == info.encoder_fingerprint:
        # The bundle may be at another path than in the earlier run.
        plan = replace(plan, model=model_record(info))
    return plan


def _allowed_failures(plan: Plan, execution: Execution) -> int:
    if execution.max_failed is not None:
        # Add 1e-6 before rounding down, because 0.29 * 100 is 28.999999999999996.
        return math.floor(execution.max_failed * plan.rows + 1e-6)
    return max(ALWAYS_ALLOWED, math.floor(DEFAULT_SHARE * plan.rows))


def _too_many_failures(
    plan: Plan,
    number: int,
    allowed: int,
    done: int,
    failed: Mapping[str, int],
    kept: str = "",
) -> FailedInputsError:
    """Return the error for `number` failures among the first `done` inputs. `kept` is
    appended to the first sentence.
    """
    advice = "raise the share to index the others"
    first = "" if done == plan.rows else "the first "
    if number == done:
        advice = "relative paths in a list begin at the directory of the list"
    return FailedInputsError(
        f"{number:,} of {first}{counted(done, 'input')} failed, more than the"
        f" {allowed:,} that may fail ({by_reason(failed)}){kept}; {advice}",
        parameter="max_failed",
    )


def _failed_duplicates(layout: Place, receipts: Sequence[ShardReceipt]) -> int:
    """Return the number of duplicates whose original has failed. Inputs of formats that
    are not decoded do not count as failed.
    """
    failed = {
        row["row_id"]
        for row in failed_rows(layout, receipts)
        if row["reason"] not in UNDECODED
    }
    duplicates = 0
    for receipt in receipts:
        rows = read_staged_rows(layout, receipt.shard, ["duplicate_of"])
        duplicates += sum(row in failed for row in rows["duplicate_of"].to_pylist())
    return duplicates


def failed_rows(layout: Place, receipts: Sequence[ShardReceipt]) -> Iterator[Json]:
    """Yield the row id, uri, reason and detail of the failed rows of written shards, in
    row order.
    """
    columns = ["row_id", "uri", "reason", "detail", "status"]
    for shard in sorted(receipt.shard for receipt in receipts if receipt.failed):
        for row in read_staged_rows(layout, shard, columns).to_pylist():
            if row["status"] == FAILED:
                yield row


def _first_failures(layout: Place, receipts: Sequence[ShardReceipt]) -> str:
    """Return a text with the uris and reasons of the first failed inputs."""
    first = itertools.islice(failed_rows(layout, receipts), _NAMED_FAILURES)
    return ", ".join(f"{row['uri']} ({row['reason']})" for row in first)


class ShardWorker:
    """Worker that loads the encoder and encodes one shard per call. Thread-safe.

    Args:
        bundle: directory of the model bundle.
        settings: settings of the build.
        device: device of the encoder.
        helpers: number of helper processes that prepare inputs for a shard. 0 prepares
            them in threads of this process. None derives the number from the CPUs: the
            number of threads of a model on a CPU; for a GPU, the share of this worker
            without the thread that feeds the GPU.
        at_once: number of shards that this worker encodes at the same time.
        per_gpu: number of shards that are encoded at the same time on one GPU, by all
            its workers together. The CPUs of the machine are divided evenly among the
            shards on all its GPUs.
    """

    def __init__(
        self,
        bundle: str,
        settings: BuildSettings,
        device: str,
        helpers: int | None = None,
        at_once: int = 1,
        per_gpu: int = SHARDS_PER_GPU,
    ) -> None:
        from edje_index.indexing.image_encoder import ImageEncoder, read_preprocessor
        from edje_index.indexing.shard_encoding import batches_in_memory
        from edje_index.inputs.helpers import Helpers, Threads
        from edje_index.inputs.preparation import Preparation

        threads = settings.threads
        if settings.is_cuda:
            share = usable_cpus() // (per_gpu * machine_gpus())
            threads = min(max(1, share - 1), _MAX_HELPERS)
        if helpers is None:
            helpers = threads
        self._pools: queue.SimpleQueue[Helpers | Threads] = queue.SimpleQueue()
        preprocess = read_preprocessor(read_bundle_info(bundle))
        preparation = Preparation(settings.decoding, preprocess)
        inputs = settings.decoding.inputs_per_batch(settings.batch_size)
        positions = batches_in_memory(settings.batch_size) * inputs
        open_helpers = Helpers if helpers else Threads
        # The helpers start while the encoder is loaded.
        pools = [
            open_helpers(helpers or threads, preparation, positions)
            for _ in range(at_once)
        ]
        self._encoder = ImageEncoder.open(
            bundle, device=device, threads=settings.threads, dtype=settings.dtype
        )
        for pool in pools:
            self._encoder.pin(pool.pixels)
            self._pools.put(pool)

    def __call__(
        self,
        task: ShardTask,
        on_progress: Callable[[ShardProgress], None],
        should_stop: ShouldStop,
    ) -> ShardReceipt:
        from edje_index.indexing.shard_encoding import encode_shard

        pool = self._pools.get()
        try:
            return encode_shard(task, self._encoder, pool, on_progress, should_stop)
        finally:
            self._pools.put(pool)

    def close(self) -> None:
        """End the helper processes."""
        while not self._pools.empty():
            pool = self._pools.get()
            self._encoder.unpin(pool.pixels)
            pool.close()
