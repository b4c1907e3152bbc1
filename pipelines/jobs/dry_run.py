"""Shows what a build or an append would do, and the disk space and memory that it needs. Nothing is written."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.environment import free_disk
from pipelines.jobs.add_rows import bundle_of, inputs_to_append, settings_of_rows, source_group
from pipelines.jobs.build import check_finished, ignore, never, nothing_to_index, source_names
from pipelines.jobs.plan import BuildSettings, Plan, refuse_differences, settings_of
from pipelines.jobs.resources import (
    check_ann_memory,
    check_disk,
    check_extension_memory,
    check_workers,
    disk_need,
    model_memory_need,
    usable_memory,
)
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.object_store import local_path

if TYPE_CHECKING:
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
) -> DryRun:
    """Return what `pipelines.build_index` would do with the same arguments. The sources are listed again.

    Raises:
        UsageError: the build would refuse the settings, the sources or this machine.
        ModelError: the model bundle cannot be used.
        CorruptIndexError: the index or the plan is damaged.
        JobStopped: `should_stop()` returned True.
    """
    from edje_index.bundles.info import read_bundle_info
    from pipelines.sources import count_ignored, digested, iter_all, mark_duplicates, open_sources
    from storage_formats.change import check_free, is_unfinished
    from storage_formats.format.receipts import read_receipt

    names, root = source_names(sources), local_path(out)
    info = read_bundle_info(local_path(model))

    def settings_after(stored: BuildSettings | None) -> BuildSettings:
        return BuildSettings.choose(stored, sources=names, **settings)

    finished_shards, failed, ignored = 0, dict[str, int](), dict[str, int]()
    if Layout(root).manifest.exists():
        manifest = check_finished(root, info, settings_after, should_stop).manifest
        chosen, spec, finished_shards = settings_of(root, manifest), manifest.spec, manifest.spec.shards
        inputs, duplicates = manifest.counts.inputs, manifest.counts.duplicates
    else:
        check_free(Layout(root))
        journal = is_unfinished(root)
        stored = Plan.from_json(journal.plan) if journal is not None and journal.plan else None
        chosen = settings_after(stored.settings if stored else None)
        if stored is not None:
            refuse_differences(root, stored.model, stored.settings, info, chosen)
            receipts = (read_receipt(Layout(root), shard, stored.fingerprint) for shard in stored.shards)
            finished_shards = sum(receipt is not None for receipt in receipts)
        opened = open_sources(names, chosen.column, clips=chosen.frames is not None)
        refs = digested(iter_all(opened), hashlib.sha256(), on_event, should_stop)
        inputs, duplicates, failed = _count(mark_duplicates(refs) if chosen.dedupe else refs)
        ignored = count_ignored(opened)
        if not inputs:
            raise nothing_to_index(names, ignored)
        spec = IndexSpec(inputs, chosen.shard_size, info.block_shape, info.embed_dim, chosen.precisions)
        check_ann_memory(spec, memory)
        if stored is None:
            check_disk(root, spec, memory)
    workers = check_workers(chosen, info, engine=engine, workers=workers, address=address, memory=memory)
    return DryRun(
        inputs=inputs,
        duplicates=duplicates,
        failed_by_reason=failed,
        ignored=ignored,
        rows=spec.rows,
        shards=spec.shards,
        finished_shards=finished_shards,
        workers=workers,
        disk_bytes=disk_need(spec, memory).parts,
        free_disk_bytes=free_disk(root),
        memory_bytes=model_memory_need(workers, chosen, info).parts,
        free_memory_bytes=usable_memory(memory),
    )


def try_append(
    index: str | Path,
    sources: str | Path | Sequence[str | Path],
    *,
    model: str | Path | None = None,
    engine: str = "ray",
    workers: int | None = None,
    address: str | None = None,
    column: str | None = None,
    max_failed: float | None = None,
    memory: int | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> DryRun:
    """Return what `pipelines.append_index` would do with the same arguments. The index is not locked.

    Raises:
        UsageError: the append would refuse the settings, the sources or this machine.
        ModelError: the model bundle cannot be used, or another bundle built the index.
        JobStopped: `should_stop()` returned True.
    """
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.working_copy import working_copy

    names = source_names(sources)
    with working_copy(index, read_only=True) as copy:
        opened = CommittedIndex.open(copy.root)
        settings, info = settings_of_rows(opened, source_group(names, column)), bundle_of(opened, model)
        workers = check_workers(settings, info, engine=engine, workers=workers, address=address, memory=memory)
        new = inputs_to_append(opened, names, column, on_event, should_stop)
        rows, _, failed = _count(new.refs)
        spec = replace(opened.manifest.spec, rows=max(1, rows), segments=())
        if rows:
            check_extension_memory(opened.manifest, rows, memory)
            check_disk(copy.root, spec, memory)
        return DryRun(
            inputs=rows + new.duplicates,
            duplicates=new.duplicates,
            failed_by_reason=failed,
            ignored=dict(new.ignored),
            rows=rows,
            shards=spec.shards if rows else 0,
            finished_shards=0,
            workers=workers,
            disk_bytes=disk_need(spec, memory).parts if rows else {},
            free_disk_bytes=free_disk(copy.root),
            memory_bytes=model_memory_need(workers, settings, info).parts,
            free_memory_bytes=usable_memory(memory),
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
