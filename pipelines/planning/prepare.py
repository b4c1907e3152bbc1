"""Prepares a build: reads what earlier runs left at the output, and makes a new plan if they left none.

A request that cannot be served is refused before anything is stored. Once the plan is stored, an interrupted build
resumes from it: the sources are not listed again and the settings cannot change.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipelines.planning.config import BuildConfig
from pipelines.planning.finished import check_finished
from pipelines.planning.inputs import check_frozen_inputs, freeze_inputs, removed_on_failure
from pipelines.planning.plan import BuildPlan, model_record, settings_of_request
from pipelines.planning.resources import check_index_size, check_workers
from pipelines.planning.stored import read_stored_build
from pipelines.progress.events import OnEvent
from pipelines.progress.stopping import ShouldStop
from storage_formats.format.layout import IndexSpec

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.receipts import ShardReceipt


@dataclass(frozen=True)
class PreparedBuild:
    """A build that can start, or that has finished.

    Attributes:
        plan: what to store.
        workers: worker processes; None lets the joined Ray cluster decide.
        receipts: the receipts of the shards that earlier runs finished, by shard.
        finished: the index, if nothing is left to do.
    """

    plan: BuildPlan
    workers: int | None = None
    receipts: dict[int, ShardReceipt] = field(default_factory=dict)
    finished: CommittedIndex | None = None


def prepare_build(config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> PreparedBuild:
    """Check the index at `config.out`, or read the plan of an unfinished one, or make a plan and store it in `build/`.

    The caller holds the lock of an unfinished index.

    Raises:
        UsageError: the request cannot be served, or it differs from what the index was built from.
        ModelError: the model bundle cannot be used.
        CorruptIndexError: the index is damaged.
        JobStopped: `should_stop()` returned True.
    """
    from edje_index.bundles.info import read_bundle_info

    stored = read_stored_build(config.out)
    info = read_bundle_info(config.model)
    settings = settings_of_request(config, info, stored.plan if stored else None)
    if stored is not None and stored.index is not None:
        check_finished(config, stored.index, stored.plan.inputs_digest, should_stop)
        return PreparedBuild(stored.plan, finished=stored.index)
    workers = check_workers(config, settings, info)
    if stored is not None:
        check_frozen_inputs(stored.plan, stored.receipts)
        plan = replace(stored.plan, model=model_record(info))  # the bundle may have moved
        return PreparedBuild(plan, workers, stored.receipts)
    with removed_on_failure(config.out):
        inputs = freeze_inputs(config, on_event, should_stop)
        plan = BuildPlan(
            root=config.out,
            spec=IndexSpec(inputs.rows, settings.shard_size, info.block_shape, info.embed_dim, settings.precisions),
            model=model_record(info),
            settings=settings,
            inputs_digest=inputs.digest,
            duplicates=inputs.duplicates,
            ignored=inputs.ignored,
            input_checksums=inputs.checksums,
        )
        check_index_size(config.out, plan.spec)
        plan.write()
    return PreparedBuild(plan, workers)
