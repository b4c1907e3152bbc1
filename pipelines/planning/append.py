"""Prepares an append: lists the new inputs, and plans a segment for them (SPEC.md section 12)."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipelines.planning.config import AppendConfig, BuildConfig
from pipelines.planning.inputs import check_frozen_inputs, removed_on_failure, write_input_lists
from pipelines.planning.plan import BuildPlan, BuildSettings, model_record, plan_of_manifest, read_plan
from pipelines.planning.prepare import PreparedBuild
from pipelines.planning.resources import check_index_size, check_workers
from pipelines.progress.events import OnEvent
from pipelines.progress.stopping import ShouldStop
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout, Segment

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from edje_index.images.inputs import InputRef
    from storage_formats.format.manifest import CommittedIndex


@dataclass(frozen=True)
class PreparedAppend:
    """An append that is ready to start.

    Attributes:
        config: build request with the settings of the append; the engine is created from this request.
        build: plan and receipts of the new rows; None if the sources hold no new inputs.
        duplicates: number of inputs that are left out, because the index or an earlier input has the same content.
    """

    config: BuildConfig
    build: PreparedBuild | None
    duplicates: int


def prepare_append(
    config: AppendConfig, index: CommittedIndex, on_event: OnEvent, should_stop: ShouldStop
) -> PreparedAppend:
    """Read the plan of a stopped append to `index`, or make a plan and store it in `build/`.

    Raises:
        UsageError: a source cannot be used, the machine lacks the device, memory or disk space, or the index was not
            made by a build.
        ModelError: the model bundle cannot be used, or did not build the index.
        EdjeError: another append has not finished, or the index has changed since the append was stopped.
        CorruptIndexError: the index or the plan is damaged.
        JobStopped: `should_stop` returned True.
    """
    from edje_index.bundles.index_bundle import matching_bundle
    from storage_formats.format.receipts import read_receipts

    info = matching_bundle(index, config.model)
    settings = _settings(config, index)
    build_config = _build_config(config, info, settings)
    workers = check_workers(build_config, settings, info)
    stored = read_plan(config.root, append=True)
    if stored is not None:
        _refuse_other_append(stored, settings, index)
        receipts = read_receipts(Layout(config.root), stored.shards, stored.fingerprint)
        check_frozen_inputs(stored, receipts)
        plan = replace(stored, model=model_record(info))
        return PreparedAppend(build_config, PreparedBuild(plan, workers, receipts), plan.duplicates)
    with removed_on_failure(config.root):
        plan = _new_plan(config, index, settings, info, on_event=on_event, should_stop=should_stop)
        if plan.input_checksums:
            check_index_size(config.root, replace(plan.spec, rows=plan.rows, segments=()))
            plan.write()
            return PreparedAppend(build_config, PreparedBuild(plan, workers), plan.duplicates)
    return PreparedAppend(build_config, None, plan.duplicates)


def is_committed(plan: BuildPlan, index: CommittedIndex) -> bool:
    """Return True if the index already holds the segment of `plan`."""
    return plan.spec.used_segments[-1] in index.manifest.spec.used_segments


def _settings(config: AppendConfig, index: CommittedIndex) -> BuildSettings:
    """Return the settings of the index, with the new sources and with `dedupe`."""
    from edje_index.images.inputs import display_path

    built = plan_of_manifest(config.root, index.manifest).settings
    sources = tuple(display_path(os.fsencode(os.path.abspath(source))) for source in config.sources)
    precisions = index.manifest.spec.precisions
    return replace(built, sources=sources, column=config.column, dedupe=True, precisions=precisions)


def _build_config(config: AppendConfig, info: BundleInfo, settings: BuildSettings) -> BuildConfig:
    return BuildConfig(
        sources=config.sources,
        out=config.root,
        model=info.path,
        engine=config.engine,
        workers=config.workers,
        threads=settings.threads,
        shard_size=settings.shard_size,
        batch_size=settings.batch_size,
        precisions=settings.precisions,
        max_failed=config.max_failed,
        address=config.address,
    )


def _refuse_other_append(stored: BuildPlan, settings: BuildSettings, index: CommittedIndex) -> None:
    """Raise EdjeError unless the stopped append has the same settings and adds to the same rows."""
    spec = index.manifest.spec
    if stored.settings != settings:
        raise EdjeError(
            f"an append of {', '.join(stored.settings.sources)} to {stored.root} has not finished; run the same append "
            "again, or discard this append with 'edje-index gc', which keeps the index"
        )
    if stored.spec.used_segments[:-1] != spec.used_segments or stored.shards.start < index.manifest.snapshot.next_shard:
        raise EdjeError(
            f"{stored.root} has changed since the append of {', '.join(stored.settings.sources)} was stopped; "
            "discard this append with 'edje-index gc', which keeps the index, and append again"
        )


def _new_plan(
    config: AppendConfig,
    index: CommittedIndex,
    settings: BuildSettings,
    info: BundleInfo,
    *,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> BuildPlan:
    """Write the lists of new inputs, and return the plan."""
    from pipelines.sources import count_ignored, digested, iter_all, mark_duplicates, open_sources

    manifest, spec = index.manifest, index.manifest.spec
    sources, digest = open_sources(config.sources, config.column), hashlib.sha256()
    listed = list(mark_duplicates(digested(iter_all(sources), digest, on_event, should_stop)))
    refs = _without_known(index, [ref for ref in listed if ref.duplicate_of is None])
    first_shard = max(spec.shards, manifest.snapshot.next_shard)
    lists = write_input_lists(
        Layout(config.root), refs, spec.shard_size, first_shard=first_shard, earlier_columns=manifest.columns
    )
    segments = (*spec.used_segments, Segment(first_shard * spec.shard_size, max(1, lists.rows)))
    return BuildPlan(
        root=config.root,
        spec=replace(spec, rows=segments[-1].stop, segments=segments),
        model=model_record(info),
        settings=settings,
        inputs_digest=digest.hexdigest(),
        duplicates=len(listed) - len(refs),
        ignored={**count_ignored(sources), **lists.ignored},
        input_checksums=lists.checksums,
        columns=lists.columns,
    )


def _without_known(index: CommittedIndex, refs: list[InputRef]) -> list[InputRef]:
    """Return the inputs whose content no row of `index` has."""
    from storage_formats.format.rows import iter_rows

    hashes = {ref.content_hash for ref in refs if ref.content_hash is not None}
    known: set[str] = set()
    for table in iter_rows(index, ["content_hash"]):
        known |= hashes.intersection(table["content_hash"].to_pylist())
    return [ref for ref in refs if ref.content_hash not in known]
