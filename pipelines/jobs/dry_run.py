"""Shows what a build would do, and the disk space and memory that it needs. Nothing is written."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.environment import free_disk
from pipelines.jobs.build import check_finished, ignore, never, nothing_to_index, source_names
from pipelines.jobs.plan import BuildSettings, Plan, refuse_differences, settings_of
from pipelines.jobs.resources import (
    check_ann_memory,
    check_disk,
    check_workers,
    disk_need,
    usable_memory,
    workers_memory,
)
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.object_store import local_path


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
    """Return what `pipelines.build_index` would do with the same arguments. The sources are listed again.

    Returns:
        The numbers of `inputs`, `duplicates`, `rows`, `shards`, `finished_shards` and `workers`; `failed_by_reason`,
        the inputs that already failed while they were listed; `ignored`, the entries of the sources that are not
        inputs; and in bytes, `disk_bytes` and `memory_bytes` by purpose, `free_disk_bytes` and `free_memory_bytes`.

    Raises:
        UsageError: the build would refuse the settings, the sources or this machine.
        ModelError: the model bundle cannot be used.
        CorruptIndexError: the index or the plan is damaged.
        JobStopped: `should_stop()` returned True.
    """
    from edje_index.bundles.info import read_bundle_info
    from pipelines.sources import count_ignored, digested, iter_all, mark_duplicates, open_sources
    from storage_formats.change import check_free, is_unfinished
    from storage_formats.format.receipts import read_receipts

    root, info = local_path(out), read_bundle_info(local_path(model))
    requested = {"sources": source_names(sources), **settings}
    finished_shards, failed, ignored = 0, Counter[str](), dict[str, int]()
    if Layout(root).manifest.exists():
        manifest = check_finished(root, info, requested, should_stop)
        chosen, spec, finished_shards = settings_of(root, manifest), manifest.spec, manifest.spec.shards
        inputs, duplicates = manifest.counts.inputs, manifest.counts.duplicates
    else:
        check_free(Layout(root))
        journal = is_unfinished(root)
        stored = Plan.from_json(journal.plan) if journal is not None and journal.plan else None
        chosen = BuildSettings.choose(None if stored is None else stored.settings, **requested)
        if stored is not None:
            refuse_differences(root, stored.model, stored.settings, info, chosen)
            finished_shards = len(read_receipts(Layout(root), stored.shards, stored.fingerprint))
        opened = open_sources(chosen.sources, chosen.column, clips=chosen.frames is not None)
        refs = digested(iter_all(opened), hashlib.sha256(), on_event, should_stop)
        inputs = duplicates = 0
        for ref in mark_duplicates(refs) if chosen.dedupe else refs:
            inputs += 1
            if ref.problem is not None:
                failed[ref.problem] += 1
            elif ref.duplicate_of is not None:
                duplicates += 1
        ignored = count_ignored(opened)
        if not inputs:
            raise nothing_to_index(chosen.sources, ignored)
        spec = IndexSpec(inputs, chosen.shard_size, info.block_shape, info.embed_dim, chosen.precisions)
        check_ann_memory(spec, memory)
        if stored is None:
            check_disk(root, spec, memory)
    workers = check_workers(chosen, info, engine=engine, workers=workers, address=address, memory=memory)
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
