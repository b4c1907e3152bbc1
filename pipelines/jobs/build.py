"""Builds an index of images, and shows beforehand what a build would do."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edje_index.bundles.info import (
    BundleInfo,
    read_bundle_info,
    read_bundle_offset,
)
from edje_index.indexing.faiss_build import AnnRequest, build_ann
from edje_index.search.rows import caption_column
from pipelines.environment import free_disk
from pipelines.jobs.changing import notifier, resumable
from pipelines.jobs.encode import Encoded, earlier_plan, encode_rows
from pipelines.jobs.plan import (
    BuildSettings,
    Plan,
    check_inputs,
    model_record,
    processors,
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
    ignore,
    never,
)
from pipelines.progress.wording import counted
from pipelines.sources import count_ignored, digested, hash_and_mark_duplicates
from storage_formats.change import (
    begin_index,
    begin_new_index,
    check_free,
    finish_committed,
    is_unfinished,
)
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import SHARD_SIZE, IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.offset import offset_block, write_offset
from storage_formats.format.receipts import read_receipts
from storage_formats.remote.urls import local_path
from storage_formats.verify import check_files
from storage_formats.writing.publish import new_manifest


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
        dry_run: True if the update was only tried and nothing was changed. `failed`
            then counts only inputs that cannot be read; other inputs may fail when they
            are decoded.

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


def result_of(
    manifest: Manifest, encoded: Encoded, duplicates: int, started: float
) -> BuildResult:
    """Return the result of the run that made `encoded`. `duplicates` is the number of
    inputs without a row.
    """
    plan = encoded.plan
    counts = encoded.counts
    receipts = encoded.receipts
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
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
        images_per_second=encoded.speed,
        bottleneck=bottleneck(stage_seconds),
        stage_seconds=dict(stage_seconds),
        truncated=sum(receipt.truncated for receipt in receipts),
        ignored=None if plan is None else plan.ignored,
        new=counts.indexed,
    )


@name_missing_extra("build")
def build_index(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    model: str | Path,
    *,
    engine: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    threads: int | None = None,
    shard_size: int = SHARD_SIZE,
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
        shard_size: number of rows per shard.
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
    requested: dict[str, Any] = {
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
        result = result_of(manifest, Encoded(counts=manifest.counts), 0, started)
        return replace(
            result,
            shards=manifest.spec.shards,
            first_row=0,
            truncated=None,
            stage_seconds={},
            already_finished=True,
        )
    notify = notifier(on_event)
    with begin_new_index(out, "build", notify=notify) as change, resumable(out):

        def is_wanted(plan: Plan) -> bool:
            settings = BuildSettings.choose(plan.settings, **requested)
            fingerprint = plan.model["fingerprint"]
            return (settings, info.encoder_fingerprint) == (plan.settings, fingerprint)

        plan = earlier_plan(change, on_event, is_wanted)
        settings = BuildSettings.choose(
            None if plan is None else plan.settings, **requested
        )
        if plan is not None:
            refuse_differences(out, plan.model, plan.settings, info, settings)
        execution = Execution(engine, workers, address, memory, max_failed)
        execution = choose_workers(settings, info, execution)
        if plan is not None:
            # another limit than that of the first run may hold
            check_ann_memory(plan.spec, memory)
            check_inputs(out, plan, change.receipts(plan.shards, plan.fingerprint))
            # the bundle may have moved
            plan = replace(plan, model=model_record(info))
        else:
            opened = settings.open_sources()
            digest = hashlib.sha256()
            refs = digested(opened, digest, on_event, should_stop)
            stored = store_inputs(
                change.layout,
                hash_and_mark_duplicates(refs) if dedupe else refs,
                shard_size,
            )
            stored["ignored"] = {**count_ignored(opened), **stored["ignored"]}
            rows = stored.pop("rows")
            if not rows:
                raise nothing_to_index(settings.sources, stored["ignored"])
            offset = read_bundle_offset(info)
            block = None
            if offset is not None:
                block = offset_block(offset, settings.precisions)
                if block is not None:
                    write_offset(change.layout, offset)
            spec = IndexSpec(
                rows,
                shard_size,
                info.block_shape,
                info.embed_dim,
                settings.precisions,
                offset=block,
            )
            plan = Plan(
                spec, model_record(info), settings, digest.hexdigest(), **stored
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
        begin_index(out, plan.spec)
        encoded = encode_rows(change, plan, execution, on_event, should_stop)
        on_event(StatusMessage("building the nearest-neighbour index"))
        ann = build_ann(out, plan.spec, request=AnnRequest(memory=memory))
        described = {
            **asdict(plan.settings),
            "inputs_digest": plan.inputs_digest,
            **processors({}, encoded.receipts),
        }
        manifest = new_manifest(
            change.layout,
            plan.spec,
            encoded.receipts,
            plan.columns,
            model=plan.model,
            settings=described,
            plan=plan.fingerprint,
            ann=ann,
        )
        change.commit(manifest)
    return result_of(manifest, encoded, 0, started)


def try_build(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    model: str | Path,
    *,
    engine: str = "ray",
    workers: int | None = None,
    address: str | None = None,
    memory: int | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
    **settings: Any,
) -> dict[str, Any]:
    """Return what `pipelines.build_index` would do with the same arguments. The sources
    are listed again.

    Returns:
        The numbers of `inputs`, `duplicates`, `rows`, `shards`, `finished_shards` and
        `workers`; `failed_by_reason`, the inputs that already failed while they were
        listed; `ignored`, the entries of the sources that are not inputs; and in bytes,
        `disk_bytes` and `memory_bytes` by purpose, `free_disk_bytes` and
        `free_memory_bytes`.

    Raises:
        UsageError: the build would refuse the settings, the sources or this machine.
    """
    root = local_path(out)
    info = read_bundle_info(local_path(model))
    requested = {
        "sources": source_names(sources),
        "cluster": address if engine == "ray" else None,
        **settings,
    }
    finished_shards = 0
    failed = Counter[str]()
    ignored = dict[str, int]()
    if Layout(root).manifest.exists():
        manifest = check_finished(root, info, requested, should_stop)
        chosen = settings_of(root, manifest)
        spec = manifest.spec
        finished_shards = spec.shards
        inputs = manifest.counts.inputs
        duplicates = manifest.counts.duplicates
    else:
        check_free(Layout(root))
        journal = is_unfinished(root)
        stored = None
        if journal is not None and journal.plan:
            plan = Plan.from_json(journal.plan)
            receipts = read_receipts(Layout(root), plan.shards, plan.fingerprint)
            # otherwise the build would forget this plan, or make the same one
            if any(receipt.indexed for receipt in receipts.values()):
                stored = plan
                finished_shards = len(receipts)
        chosen = BuildSettings.choose(
            None if stored is None else stored.settings, **requested
        )
        if stored is not None:
            refuse_differences(root, stored.model, stored.settings, info, chosen)
        opened = chosen.open_sources()
        refs = digested(opened, hashlib.sha256(), on_event, should_stop)
        inputs = duplicates = 0
        for ref in hash_and_mark_duplicates(refs) if chosen.dedupe else refs:
            inputs += 1
            if ref.problem is not None:
                failed[ref.problem] += 1
            elif ref.duplicate_of is not None:
                duplicates += 1
        ignored = count_ignored(opened)
        if not inputs:
            raise nothing_to_index(chosen.sources, ignored)
        spec = IndexSpec(
            inputs,
            chosen.shard_size,
            info.block_shape,
            info.embed_dim,
            chosen.precisions,
        )
        check_ann_memory(spec, memory)
        if stored is None:
            check_disk(root, spec, memory)
    execution = Execution(engine, workers, address, memory)
    workers = choose_workers(chosen, info, execution).workers
    return {
        "inputs": inputs,
        "duplicates": duplicates,
        "failed_by_reason": dict(sorted(failed.items())),
        "ignored": ignored,
        "rows": spec.rows,
        "shards": spec.shards,
        "finished_shards": finished_shards,
        "workers": workers,
        "disk_bytes": disk_need(spec, memory),
        "free_disk_bytes": free_disk(root),
        "memory_bytes": workers_memory(workers, chosen, info),
        "free_memory_bytes": usable_memory(memory),
    }


def source_names(sources: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """Return the names of one or several sources."""
    return (
        (str(sources),) if isinstance(sources, str | Path) else tuple(map(str, sources))
    )


def nothing_to_index(sources: Sequence[str], ignored: dict[str, int]) -> UsageError:
    """Return the error for sources without inputs. `ignored` counts the other
    entries of the sources.
    """
    kinds = ", ".join(f"{name} {count}" for name, count in ignored.items())
    reason = (
        f"none of the files is an image ({kinds})" if kinds else "there are no files"
    )
    return UsageError(
        f"there is nothing to index in {', '.join(sources)}: {reason}",
        parameter="sources",
    )


def check_finished(
    out: Path, info: BundleInfo, requested: Mapping[str, Any], should_stop: ShouldStop
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
    digest = hashlib.sha256()
    refs = digested(settings.open_sources(), digest, ignore, should_stop)
    inputs = sum(1 for _ in refs)
    if digest.hexdigest() != index.manifest.settings.get("inputs_digest"):
        before = counted(index.manifest.counts.inputs, "input")
        raise UsageError(
            f"the sources have changed since {out} was built: they had {before} and now"
            f" have {inputs}, with other names, sizes or metadata. Update the index, or"
            " choose another output directory",
            parameter="sources",
        )
    return index.manifest
