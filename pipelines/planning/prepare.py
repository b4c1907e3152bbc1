"""Prepares a build: reads the plan of an earlier run, or makes a new plan.

An interrupted build resumes from its stored plan, so the settings cannot change.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipelines.planning.config import BuildConfig
from pipelines.planning.finished import check_sources
from pipelines.planning.inputs import check_frozen_inputs, freeze_inputs, removed_on_failure
from pipelines.planning.plan import BuildPlan, model_record, settings_of_request
from pipelines.planning.resources import check_ann_memory, check_index_size, check_workers
from pipelines.planning.stored import read_stored_build
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.format.layout import IndexSpec

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.receipts import ShardReceipt


@dataclass(frozen=True)
class PreparedBuild:
    """A build that is ready to start, or that has finished.

    Attributes:
        plan: plan of the build.
        workers: number of worker processes; None lets the Ray cluster choose the number.
        receipts: receipts of the shards that earlier runs finished, by shard number.
        finished: the finished index; None if shards remain to be encoded.
    """

    plan: BuildPlan
    workers: int | None = None
    receipts: dict[int, ShardReceipt] = field(default_factory=dict)
    finished: CommittedIndex | None = None


def prepare_build(
    config: BuildConfig,
    on_event: OnEvent,
    should_stop: ShouldStop = lambda: False,
) -> PreparedBuild:
    """Prepare the build of the index at `config.out`.

    If the index is finished, check the index. If the build has a stored plan, read the plan. Otherwise make and store a
    plan.

    Raises:
        UsageError: a source cannot be used, the machine lacks the device, memory or disk space, or the request differs
            from the model, settings or inputs of the index.
        ModelError: the model bundle cannot be used.
        CorruptIndexError: the index or the plan is damaged.
        JobStopped: `should_stop()` returned True.
    """
    from edje_index.bundles.info import read_bundle_info
    from storage_formats.presence import check_files

    stored = read_stored_build(config.out)
    info = read_bundle_info(config.model)
    settings = settings_of_request(config, info, stored.plan if stored else None)
    if stored is not None and stored.index is not None:
        check_files(stored.index)
        check_sources(config, stored.index, stored.plan.inputs_digest, should_stop)
        return PreparedBuild(stored.plan, finished=stored.index)
    workers = check_workers(config, settings, info)
    if stored is not None:
        check_ann_memory(stored.plan.spec, config.memory)  # another limit than that of the first run may hold
        check_frozen_inputs(stored.plan, stored.receipts)
        plan = replace(stored.plan, model=model_record(info))  # the bundle may have moved
        return PreparedBuild(plan, workers, stored.receipts)
    with removed_on_failure(config.out):
        spec = IndexSpec(1, settings.shard_size, info.block_shape, info.embed_dim, settings.precisions)
        plan = BuildPlan(config.out, spec, model_record(info), settings, inputs_digest="", duplicates=0, ignored={})
        inputs = freeze_inputs(config, on_event, should_stop)
        plan = replace(
            plan,
            spec=replace(spec, rows=inputs.rows),
            inputs_digest=inputs.digest,
            duplicates=inputs.duplicates,
            ignored=inputs.ignored,
            input_checksums=inputs.checksums,
            columns=inputs.columns,
        )
        check_index_size(config.out, plan.spec, config.memory)
        plan.write()
    return PreparedBuild(plan, workers)
