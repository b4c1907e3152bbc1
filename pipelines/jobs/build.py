"""The build job: run a plan's shards on an engine, then build the nearest-neighbour index and publish."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engines.base import (
    Engine,
    EngineUnavailableError,
    TaskFailure,
    TaskInterrupted,
    Worker,
    WorkerFactory,
    describe_error,
)
from pipelines.engines.inline import InlineEngine
from pipelines.jobs.lock import locked_index
from pipelines.planning.config import BuildConfig
from pipelines.planning.make_plan import (
    check_finished,
    check_out_folder,
    choose_workers,
    finished_manifest,
    plan_build,
)
from pipelines.planning.plan import BuildPlan
from pipelines.progress.events import Bottleneck, OnEvent, PlanReady, StatusMessage
from pipelines.progress.meter import ShardMeter, ShardState, bottleneck
from pipelines.progress.stopping import JobStopped, ShouldStop
from storage_formats.cpus import usable_cpus
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from edje_index.indexing.shard_encoding import ShardTask, StageProgress
    from storage_formats.format.manifest import Counts, Manifest
    from storage_formats.format.receipts import ShardReceipt

_MAX_DECODE_THREADS = 16


@dataclass(frozen=True)
class BuildResult:
    """What a build came to.

    Attributes:
        inputs, indexed, duplicates, failed: counts of inputs; the first is the sum of the others.
        failed_by_reason: the failed ones by reason.
        rows, shards: of the index.
        seconds: wall time of this run.
        images_per_second: rows that this run encoded, over the time that its shards took; 0 where it encoded none.
        bottleneck: what the workers spent most time on, over all shards.
        already_finished: the index was finished before this run.
    """

    inputs: int
    indexed: int
    duplicates: int
    failed: int
    failed_by_reason: dict[str, int]
    rows: int
    shards: int
    seconds: float
    images_per_second: float
    bottleneck: Bottleneck | None
    already_finished: bool = False

    @classmethod
    def of(cls, manifest: Manifest, seconds: float, *, already_finished: bool, **rates: Any) -> BuildResult:
        """The result that a manifest tells."""
        counts = manifest.counts
        return cls(
            inputs=counts.inputs,
            indexed=counts.indexed,
            duplicates=counts.duplicates,
            failed=counts.failed_total,
            failed_by_reason=counts.failed,
            rows=manifest.spec.rows,
            shards=manifest.spec.shards,
            seconds=seconds,
            already_finished=already_finished,
            **rates,
        )


def run_build(config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> BuildResult:
    """Plan and build what `config` asks for; resume what was begun; find out that it is finished.

    Raises:
        UsageError, ModelError: the request cannot be served.
        JobStopped: the build ended before its end; running it again resumes it.
        EdjeError: another process is at work on the index, or no input could be indexed.
    """
    started = time.monotonic()
    manifest = finished_manifest(config)
    if manifest is None:
        check_out_folder(config)
        with locked_index(config.out):
            manifest = finished_manifest(config)  # perhaps by the process that held the lock
            if manifest is None:
                plan = plan_build(config, on_event, should_stop)
                workers = choose_workers(config, plan.settings)
                return build_index(plan, make_engine(config, plan, workers), workers or 1, on_event, should_stop)
    check_finished(config, manifest, should_stop)
    return BuildResult.of(
        manifest, time.monotonic() - started, already_finished=True, images_per_second=0.0, bottleneck=None
    )


def make_engine(config: BuildConfig, plan: BuildPlan, workers: int | None) -> Engine:
    """The engine that `config` names."""
    if config.engine == "inline":
        return InlineEngine()
    from pipelines.engines.ray_engine import RayEngine

    gpus = 1 if plan.settings.device == "cuda" else 0
    return RayEngine(workers, cpus=plan.settings.threads, gpus=gpus, address=config.address)


def build_index(
    plan: BuildPlan, engine: Engine, workers: int, on_event: OnEvent, should_stop: ShouldStop = lambda: False
) -> BuildResult:
    """Encode the shards that are not committed yet, build `ann/`, and publish.

    The caller holds the index's lock. Whatever is committed stays when this raises.

    Raises:
        JobStopped: `should_stop()` turned true, a shard failed, the engine broke down, or the disk is full.
        UsageError: the engine cannot do what was asked of it.
        EdjeError: no input could be indexed.
    """
    run = _Run(plan, workers, on_event)
    try:
        return run.build(engine, should_stop)
    except OSError as error:
        raise JobStopped(f"cannot write {plan.root}: {describe_error(error)} ({run.standing()})") from error


class _Run:
    """One run over a plan."""

    def __init__(self, plan: BuildPlan, workers: int, on_event: OnEvent) -> None:
        self._plan = plan
        self._layout = Layout(plan.root)
        self._workers = workers
        self._on_event = on_event
        self._started = time.monotonic()
        self._meter = ShardMeter("indexing", plan.spec.rows, plan.spec.shards)
        self._receipts: dict[int, ShardReceipt] = {}

    def standing(self) -> str:
        """How much is kept."""
        return f"{len(self._receipts)} of {self._plan.spec.shards} shards are finished"

    def build(self, engine: Engine, should_stop: ShouldStop) -> BuildResult:
        from storage_formats.writing.publish import begin_index, clear_staging, total_counts

        self._find_receipts()
        begin_index(self._plan.root, self._plan.spec)
        clear_staging(self._plan.root)
        self._on_event(self._plan_ready())
        try:
            rates = self._run_shards(engine, should_stop)
        except (UsageError, JobStopped, EngineUnavailableError):
            raise
        except EdjeError as error:
            raise JobStopped(f"{error} ({self.standing()})") from error
        if len(self._receipts) < self._plan.spec.shards:
            raise JobStopped(f"stopped; {self.standing()}")
        receipts = list(self._receipts.values())
        _refuse_empty(total_counts(receipts), self._plan.root)
        manifest = self._publish(receipts)
        return BuildResult.of(manifest, time.monotonic() - self._started, already_finished=False, **rates)

    def _find_receipts(self) -> None:
        from storage_formats.format.receipts import read_receipt

        for shard in range(self._plan.spec.shards):
            receipt = read_receipt(self._layout, shard, self._plan.fingerprint)
            if receipt is not None:
                self._receipts[shard] = receipt
                self._meter.finish(shard, ShardState(receipt.rows, sum(receipt.failed.values())))

    def _plan_ready(self) -> PlanReady:
        plan = self._plan
        return PlanReady(
            inputs=plan.spec.rows,
            duplicates=plan.duplicates,
            shards=plan.spec.shards,
            finished_shards=len(self._receipts),
            ignored=plan.ignored,
            workers=self._workers,
        )

    def _run_shards(self, engine: Engine, should_stop: ShouldStop) -> dict[str, Any]:
        """Run what is missing. JobStopped for the first shard that fails; those under way are ended."""
        missing = [shard for shard in range(self._plan.spec.shards) if shard not in self._receipts]
        started = time.monotonic()
        rows = 0
        if missing:
            outcomes = engine.run(
                _worker_factory(self._plan), self._tasks(missing), on_progress=self._progress, should_stop=should_stop
            )
            with contextlib.closing(outcomes):
                for outcome in outcomes:
                    if isinstance(outcome, TaskFailure):
                        raise self._failure(outcome)
                    rows += outcome.result.rows
                    self._shard_done(outcome.result)
        seconds = time.monotonic() - started
        return {"images_per_second": rows / seconds if rows else 0.0, "bottleneck": bottleneck(self._stage_seconds())}

    def _tasks(self, shards: list[int]) -> Iterator[ShardTask]:
        from edje_index.indexing.shard_encoding import ShardTask

        settings = self._plan.settings
        for shard in shards:
            yield ShardTask(
                root=str(self._plan.root.absolute()),
                shard=shard,
                spec=self._plan.spec,
                plan=self._plan.fingerprint,
                batch_size=settings.batch_size,
                max_pixels=settings.max_pixels,
                decode_threads=self._decode_threads(),
            )

    def _decode_threads(self) -> int:
        """Threads that decode for one worker. On a CPU the model's own threads leave room for no more than as many."""
        settings = self._plan.settings
        share = settings.threads if settings.device == "cpu" else usable_cpus() // self._workers
        return min(max(1, share), _MAX_DECODE_THREADS)

    def _progress(self, progress: StageProgress) -> None:
        state = ShardState(progress.done, progress.failed, _stages(progress))
        self._on_event(self._meter.update(progress.shard, state))

    def _shard_done(self, receipt: ShardReceipt) -> None:
        self._receipts[receipt.shard] = receipt
        state = ShardState(receipt.rows, sum(receipt.failed.values()), receipt.seconds)
        self._on_event(self._meter.finish(receipt.shard, state))

    def _stage_seconds(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for receipt in self._receipts.values():
            for stage, seconds in receipt.seconds.items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total

    def _failure(self, failure: TaskFailure) -> JobStopped:
        rows = self._plan.spec.shard_rows(failure.task.shard)
        error = JobStopped(
            f"shard {failure.task.shard} (rows {rows.start} to {rows.stop - 1}): {failure.message} ({self.standing()})"
        )
        if failure.trace:
            error.add_note(failure.trace)
        return error

    def _publish(self, receipts: list[ShardReceipt]) -> Manifest:
        from edje_index.indexing.faiss_index import build_ann
        from storage_formats.writing.publish import Provenance, finish_index

        plan = self._plan
        self._on_event(StatusMessage("building the nearest-neighbour index"))
        ann = build_ann(plan.root, plan.spec)
        settings = {**asdict(plan.settings), "inputs_digest": plan.inputs_digest}
        return finish_index(plan.root, plan.spec, receipts, Provenance(plan.model, settings, plan.fingerprint), ann)


@dataclass(frozen=True)
class EncodeWorker:
    """A worker of `pipelines.engines`: one encoder, one shard after another."""

    encoder: Any

    def __call__(
        self, task: ShardTask, on_progress: Callable[[StageProgress], None], should_stop: Callable[[], bool]
    ) -> ShardReceipt:
        from edje_index.indexing.shard_encoding import EncodingInterrupted, encode_shard

        try:
            return encode_shard(task, self.encoder, on_progress, should_stop)
        except EncodingInterrupted as error:
            raise TaskInterrupted from error


def open_worker(bundle: str, device: str, threads: int, dtype: str) -> Worker:
    """Load the encoder in the process that calls this."""
    from edje_index.indexing.image_encoder import ImageEncoder

    return EncodeWorker(ImageEncoder.open(bundle, device=device, threads=threads, dtype=dtype))


def _worker_factory(plan: BuildPlan) -> WorkerFactory:
    settings = plan.settings
    return functools.partial(open_worker, str(plan.model["bundle"]), settings.device, settings.threads, settings.dtype)


def _stages(progress: StageProgress) -> dict[str, float]:
    return {"wait": progress.wait, "encode": progress.encode, "write": progress.write}


def _refuse_empty(counts: Counts, root: Path) -> None:
    """EdjeError when nothing was indexed: an index without a row would only hide what went wrong."""
    if not counts.indexed:
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.failed.items())
        raise EdjeError(
            f"none of the {counts.inputs} inputs could be indexed ({reasons}), and no index was written; "
            f"mend the sources, remove {root} and build again"
        )
