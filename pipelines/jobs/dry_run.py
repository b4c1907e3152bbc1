"""Shows what a build or an append would do, and the disk space and memory that it needs. Nothing is written."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from edje_index.images.inputs import InputRef


@dataclass(frozen=True)
class DryRun:
    """What a build or an append would do, and what it needs.

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


def try_build(config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> DryRun:
    """Return what the build would do. The sources are listed again, also for a stopped build.

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
    inputs, duplicates, failed = _count(mark_duplicates(refs) if config.dedupe else refs)
    if stored is not None and stored.index is not None and digest.hexdigest() != stored.plan.inputs_digest:
        raise sources_changed(config, stored.index, inputs)
    if not inputs:
        raise UsageError(
            f"there is nothing to index in {', '.join(config.sources)}; check the sources", parameter="sources"
        )
    spec = IndexSpec(inputs, settings.shard_size, info.block_shape, info.embed_dim, settings.precisions)
    finished_shards = 0
    if stored is None:
        check_index_size(config.out, spec, config.memory)
    elif stored.index is not None:
        finished_shards = spec.shards
    else:
        check_ann_memory(stored.plan.spec, config.memory)
        finished_shards = len(stored.receipts)
    return DryRun(
        inputs=inputs,
        duplicates=duplicates,
        failed_by_reason=failed,
        ignored=count_ignored(sources),
        rows=spec.rows,
        shards=spec.shards,
        finished_shards=finished_shards,
        workers=workers,
        disk_bytes=disk_need(spec, config.memory).parts,
        **_machine(config, settings, info, workers),
    )


def try_append(config: AppendConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> DryRun:
    """Return what the append would do. The index is not locked.

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
    rows, _, failed = _count(new.refs)
    if rows:
        request.check_size(rows)
    spec = replace(index.manifest.spec, rows=max(1, rows), segments=())
    return DryRun(
        inputs=rows + new.duplicates,
        duplicates=new.duplicates,
        failed_by_reason=failed,
        ignored=dict(new.ignored),
        rows=rows,
        shards=spec.shards if rows else 0,
        finished_shards=finished_shards,
        workers=request.workers,
        disk_bytes=disk_need(spec, config.memory).parts if rows else {},
        **_machine(request.build, request.settings, request.info, request.workers),
    )


def _count(refs: Iterable[InputRef]) -> tuple[int, int, dict[str, int]]:
    """Return the numbers of inputs and of duplicates in `refs`, and the number of failed inputs by reason."""
    inputs = duplicates = 0
    failed: Counter[str] = Counter()
    for ref in refs:
        inputs += 1
        if ref.problem is not None:
            failed[ref.problem] += 1
        elif ref.duplicate_of is not None:
            duplicates += 1
    return inputs, duplicates, dict(sorted(failed.items()))


def _machine(config: BuildConfig, settings: BuildSettings, info: BundleInfo, workers: int | None) -> dict[str, Any]:
    """Return the fields of `DryRun` about memory and free space."""
    return {
        "free_disk_bytes": free_disk(config.out),
        "memory_bytes": model_memory_need(workers, settings, info).parts,
        "free_memory_bytes": usable_memory(config.memory),
    }
