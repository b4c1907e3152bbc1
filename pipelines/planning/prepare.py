"""Prepares a build: finds the plan of an unfinished index, or makes a new one.

A request that cannot be served is refused before anything is stored. Once the plan is stored, an interrupted build
resumes from it: the sources are not listed again and the settings cannot change.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace

from pipelines.planning.config import BuildConfig
from pipelines.planning.inputs import freeze_inputs
from pipelines.planning.plan import BuildPlan, BuildSettings, model_record, read_plan, refuse_differences
from pipelines.planning.resources import check_index_size, check_workers
from pipelines.progress.events import OnEvent
from pipelines.progress.stopping import ShouldStop
from storage_formats.format.layout import IndexSpec, Layout


@dataclass(frozen=True)
class PreparedBuild:
    """A build that can start.

    Attributes:
        plan: what to store.
        workers: worker processes; None lets the joined Ray cluster decide.
        max_failed: share of the inputs that may fail.
    """

    plan: BuildPlan
    workers: int | None
    max_failed: float


def prepare_build(config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> PreparedBuild:
    """Read the plan of the unfinished index at `config.out`, or make a new plan and store it in `build/`.

    The caller holds the lock of the index.

    Raises:
        UsageError: the request cannot be served, or it differs from the unfinished index.
        ModelError: the model bundle cannot be used.
        JobStopped: `should_stop()` returned True.
    """
    from edje_index.bundles.info import read_bundle_info

    info = read_bundle_info(config.model)
    begun = read_plan(config.out)
    settings = BuildSettings.choose(config, begun.settings if begun else None)
    if begun is not None:
        refuse_differences(begun, info, settings)
    workers = check_workers(config, settings, info)
    if begun is not None:
        plan = replace(begun, model=model_record(info))  # the bundle may have moved
        return PreparedBuild(plan, workers, config.max_failed)
    try:
        inputs = freeze_inputs(config, on_event, should_stop)
        spec = IndexSpec(inputs.rows, settings.shard_size, info.block_shape, info.embed_dim, settings.precisions)
        check_index_size(config.out, spec)
        plan = BuildPlan(
            root=config.out,
            spec=spec,
            model=model_record(info),
            settings=settings,
            inputs_digest=inputs.digest,
            duplicates=inputs.duplicates,
            ignored=inputs.ignored,
            input_checksums=inputs.checksums,
        )
        plan.write()
    except BaseException:
        Layout(config.out).plan.unlink(missing_ok=True)  # it may be in place though flushing its directory failed
        shutil.rmtree(Layout(config.out).inputs(0).parent, ignore_errors=True)
        raise
    return PreparedBuild(plan, workers, config.max_failed)
