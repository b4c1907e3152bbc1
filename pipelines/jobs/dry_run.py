"""Estimates the cost of a build or an append. Nothing is written."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipelines.jobs.encode_shards import decode_threads
from pipelines.planning.append import new_inputs, refuse_other_append
from pipelines.planning.config import AppendConfig, BuildConfig
from pipelines.planning.finished import sources_changed
from pipelines.planning.machine import free_disk
from pipelines.planning.new_rows import request_rows
from pipelines.planning.output import check_output
from pipelines.planning.plan import BuildSettings, read_plan, settings_of_request
from pipelines.planning.resources import (
    check_ann_memory,
    check_index_size,
    check_workers,
    disk_need,
    model_memory_need,
    usable_memory,
)
from pipelines.planning.stored import read_stored_build
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import ShouldStop
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from edje_index.images.inputs import InputRef
    from edje_index.indexing.trial import TrialTimes

_SAMPLED_IMAGES = 16


@dataclass(frozen=True)
class DryRun:
    """The estimated cost of a build or an append.

    Attributes:
        inputs: number of inputs in all sources.
        duplicates: number of inputs that will not be encoded, because the index or an earlier input has the same
            content.
        failed_by_reason: number of inputs that already failed while they were listed, by reason.
        ignored: number of entries in the sources that are not inputs, by suffix or reason.
        rows: number of rows that the index will get.
        shards: number of shards to write.
        finished_shards: number of these shards that an earlier run finished.
        workers: number of worker processes; None if the Ray cluster chooses the number.
        disk_bytes: disk space of the new rows by purpose.
        free_disk_bytes: free disk space.
        memory_bytes: lower bound of the memory of all workers by purpose.
        free_memory_bytes: free memory of this machine, at most the limit in the request.
        sampled_images: number of images that were encoded to estimate the time.
        seconds: estimated wall time; None if the time is unknown.
    """

    inputs: int
    duplicates: int
    failed_by_reason: dict[str, int]
    ignored: dict[str, int]
    rows: int
    shards: int
    finished_shards: int
    workers: int | None
    disk_bytes: dict[str, int]
    free_disk_bytes: int
    memory_bytes: dict[str, int]
    free_memory_bytes: int
    sampled_images: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class _Listing:
    """Counts of the inputs in the sources, and a random sample of the inputs to encode."""

    inputs: int
    duplicates: int
    failed: dict[str, int]
    ignored: dict[str, int]
    sample: list[InputRef] = field(repr=False)


def try_build(config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> DryRun:
    """Return the estimated cost of the build. The sources are listed again, also for a stopped build.

    Raises:
        UsageError: the build would refuse the settings, the sources or this machine.
        ModelError: the model bundle cannot be used.
        CorruptIndexError: the index or the plan is damaged.
        JobStopped: `should_stop()` returned True.
    """
    from edje_index.bundles.info import read_bundle_info
    from pipelines.sources import count_ignored, digested, iter_all, mark_duplicates, open_sources
    from storage_formats.presence import check_files

    check_output(config)
    stored = read_stored_build(config.out)
    info = read_bundle_info(config.model)
    settings = settings_of_request(config, info, stored.plan if stored else None)
    if stored is not None and stored.index is not None:
        check_files(stored.index)
    workers = check_workers(config, settings, info)
    sources = open_sources(config.sources, config.column, clips=config.frames is not None)
    digest = hashlib.sha256()
    refs = digested(iter_all(sources), digest, on_event, should_stop)
    listing = _list(mark_duplicates(refs) if config.dedupe else refs)
    listing = replace(listing, ignored=count_ignored(sources))
    if stored is not None and stored.index is not None and digest.hexdigest() != stored.plan.inputs_digest:
        raise sources_changed(config, stored.index, listing.inputs)
    if not listing.inputs:
        raise UsageError(
            f"there is nothing to index in {', '.join(config.sources)}; check the sources", parameter="sources"
        )
    spec = IndexSpec(listing.inputs, settings.shard_size, info.block_shape, info.embed_dim, settings.precisions)
    is_finished = stored is not None and stored.index is not None
    if stored is None:
        check_index_size(config.out, spec, config.memory)
    elif not is_finished:
        check_ann_memory(stored.plan.spec, config.memory)
    finished_shards = spec.shards if is_finished else len(stored.receipts) if stored is not None else 0
    return _dry_run(_Cost(config, settings, info, workers), listing, spec, finished_shards, on_event)


def try_append(config: AppendConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> DryRun:
    """Return the estimated cost of the append. The index is not locked.

    Raises:
        UsageError: the append would refuse the settings, the sources or this machine.
        ModelError: the model bundle cannot be used, or another bundle built the index.
        EdjeError: another change of the index has not finished.
        JobStopped: `should_stop()` returned True.
    """
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.receipts import read_receipts

    index = CommittedIndex.open(config.root)
    request = request_rows(config, index, "append")
    stored, finished_shards = read_plan(config.root, append=True), 0
    if stored is not None:
        refuse_other_append(stored, request)
        finished_shards = len(read_receipts(Layout(config.root), stored.shards, stored.fingerprint))
    new = new_inputs(config, index, on_event, should_stop)
    listing = _list(new.refs)
    listing = replace(
        listing, inputs=listing.inputs + new.duplicates, duplicates=new.duplicates, ignored=dict(new.ignored)
    )
    if new.refs:
        request.check_size(len(new.refs))
    spec = replace(index.manifest.spec, rows=max(1, len(new.refs)), segments=())
    cost = _Cost(request.build, request.settings, request.info, request.workers)
    return _dry_run(cost, listing, spec if new.refs else None, finished_shards, on_event)


@dataclass(frozen=True)
class _Cost:
    """The values that the cost depends on, apart from the inputs."""

    config: BuildConfig
    settings: BuildSettings
    info: BundleInfo
    workers: int | None


def _dry_run(cost: _Cost, listing: _Listing, spec: IndexSpec | None, finished_shards: int, on_event: OnEvent) -> DryRun:
    """Return the estimated cost of the new rows that `spec` describes. A `spec` of None means no new rows."""
    rows, shards = (0, 0) if spec is None else (spec.rows, spec.shards)
    to_encode = listing.inputs - listing.duplicates - sum(listing.failed.values())
    times = _trial(cost, listing.sample, on_event) if shards > finished_shards else None
    return DryRun(
        inputs=listing.inputs,
        duplicates=listing.duplicates,
        failed_by_reason=dict(sorted(listing.failed.items())),
        ignored=listing.ignored,
        rows=rows,
        shards=shards,
        finished_shards=finished_shards,
        workers=cost.workers,
        disk_bytes={} if spec is None else disk_need(spec, cost.config.memory).parts,
        free_disk_bytes=free_disk(cost.config.out),
        memory_bytes=model_memory_need(cost.workers, cost.settings, cost.info).parts,
        free_memory_bytes=usable_memory(cost.config.memory),
        sampled_images=0 if times is None else times.images,
        seconds=_seconds(cost, times, to_encode, share_left=1 - finished_shards / max(1, shards)),
    )


def _seconds(cost: _Cost, times: TrialTimes | None, images: int, *, share_left: float) -> float | None:
    if share_left <= 0 or not images:
        return 0.0
    if times is None or cost.workers is None:
        return None
    threads = decode_threads(cost.settings, cost.workers)
    return images * share_left * times.seconds_per_image(threads) / cost.workers


def _list(refs: Iterable[InputRef]) -> _Listing:
    """Count `refs`, and draw a random sample of the inputs to encode (reservoir sampling).

    The sample keeps the order of the inputs. In another order, a compressed archive would be read several times.
    """
    rng, inputs, duplicates, good = random.Random(0), 0, 0, 0
    failed: Counter[str] = Counter()
    sample: list[tuple[int, InputRef]] = []
    for ref in refs:
        inputs += 1
        if ref.problem is not None:
            failed[ref.problem] += 1
        elif ref.duplicate_of is not None:
            duplicates += 1
        else:
            good += 1
            if len(sample) < _SAMPLED_IMAGES:
                sample.append((inputs, ref))
            elif (position := rng.randrange(good)) < _SAMPLED_IMAGES:
                sample[position] = (inputs, ref)
    ordered = [ref for _, ref in sorted(sample, key=lambda drawn: drawn[0])]
    return _Listing(inputs, duplicates, dict(failed), {}, ordered)


def _trial(cost: _Cost, sample: list[InputRef], on_event: OnEvent) -> TrialTimes | None:
    """Measure the time to encode the images of `sample` on this machine.

    Return None if `sample` is empty, or if the workers run in a Ray cluster.
    """
    from edje_index.images.decoded_input import DecodeSettings
    from edje_index.indexing.image_encoder import ImageEncoder
    from edje_index.indexing.shard_task import least_side
    from edje_index.indexing.trial import time_encoding

    settings = cost.settings
    if not sample or cost.config.address is not None:
        return None
    on_event(StatusMessage(f"encoding {len(sample)} images to estimate the time"))
    encoder = ImageEncoder.open(cost.info.path, device=settings.device, threads=settings.threads, dtype=settings.dtype)
    decoding = DecodeSettings(
        settings.max_pixels, settings.truncated, settings.frames, least_side(settings.jpeg, encoder)
    )
    return time_encoding(encoder, sample, decoding, batch_size=settings.batch_size)
