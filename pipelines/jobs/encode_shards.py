"""Encodes the images of each shard with the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.engines.base import Engine, TaskInterrupted, Worker, WorkerFactory, open_engine
from pipelines.jobs.failed_inputs import FailureLimit
from pipelines.jobs.shard_run import ShardJob, ShardRun, run_shards
from pipelines.jobs.shared_directory import on_shared_directory
from pipelines.planning.config import BuildConfig
from pipelines.planning.plan import BuildPlan, BuildSettings
from pipelines.planning.prepare import PreparedBuild
from pipelines.progress.events import OnEvent, PlanReady, ShardState, ShouldStop
from storage_formats.cpus import usable_cpus

if TYPE_CHECKING:
    from edje_index.indexing.shard_encoding import StageProgress
    from edje_index.indexing.shard_task import ShardTask
    from storage_formats.format.receipts import ShardReceipt

_MAX_DECODE_THREADS = 16


def encode_shards(config: BuildConfig, prepared: PreparedBuild, on_event: OnEvent, should_stop: ShouldStop) -> ShardRun:
    """Encode the shards that earlier runs did not finish. Return the receipts of all shards.

    Raises:
        UsageError, EngineUnavailableError: the engine cannot run with the requested workers or devices.
        FailedInputsError: more inputs failed than `config.max_failed` allows. Finished shards are kept.
        JobStopped: `should_stop()` returned True, or a shard failed. Finished shards are kept.
        OSError: the index cannot be written.
    """
    from storage_formats.writing.begin import begin_index, clear_staging

    plan, workers = prepared.plan, prepared.workers
    make_worker, engine = open_workers(config, prepared)
    job = ShardJob(
        activity="indexing",
        shards=plan.shards,
        rows=plan.rows,
        make_worker=make_worker,
        make_task=functools.partial(_shard_task, prepared),
        state_of_report=_state_of_report,
        state_of_receipt=_state_of_receipt,
        on_receipt=FailureLimit(plan, config.max_failed),
    )
    finished_shards = len(prepared.receipts)
    on_event(PlanReady(plan.rows, len(plan.shards), finished_shards, workers, plan.duplicates, plan.ignored))
    clear_staging(plan.root)
    if not plan.is_append:
        begin_index(plan.root, plan.spec)
    return run_shards(job, prepared.receipts, engine, on_event, should_stop)


def open_workers(config: BuildConfig, prepared: PreparedBuild) -> tuple[WorkerFactory, Engine]:
    """Return a function that opens a worker of a build, and the engine that calls it.

    The calling process must hold the lock of the index.

    Raises:
        UsageError: the address of the Ray cluster is not valid.
    """
    bundle, settings = str(prepared.plan.model["bundle"]), prepared.plan.settings
    make_worker = functools.partial(open_worker, bundle, settings.device, settings.threads, settings.dtype)
    gpus = 1 if settings.device == "cuda" else 0
    engine = open_engine(config.engine, prepared.workers, cpus=settings.threads, gpus=gpus, address=config.address)
    return on_shared_directory(prepared.plan.root, make_worker), engine


def _shard_task(prepared: PreparedBuild, shard: int) -> ShardTask:
    return encoding_task(prepared.plan, shard, decode_threads(prepared.plan.settings, prepared.workers))


def encoding_task(plan: BuildPlan, shard: int, threads: int = 1) -> ShardTask:
    """Return the task that encodes `shard`, with `threads` threads that decode images."""
    from edje_index.indexing.shard_task import ShardTask

    return ShardTask(
        root=str(plan.root.absolute()),
        shard=shard,
        spec=plan.spec,
        plan=plan.fingerprint,
        batch_size=plan.settings.batch_size,
        max_pixels=plan.settings.max_pixels,
        decode_threads=threads,
        columns=plan.columns,
        truncated=plan.settings.truncated,
        frames=plan.settings.frames,
    )


def decode_threads(settings: BuildSettings, workers: int | None) -> int:
    """Return the number of decoding threads per worker, at most 16."""
    # If the model runs on the CPU, this is the number of threads of the model. Otherwise the workers share all CPUs.
    threads = settings.threads if settings.device == "cpu" else usable_cpus() // (workers or 1)
    return min(max(1, threads), _MAX_DECODE_THREADS)


def _state_of_report(progress: StageProgress) -> tuple[int, ShardState]:
    seconds = {"wait": progress.wait, "encode": progress.encode, "write": progress.write}
    return progress.shard, ShardState(progress.done, progress.failed, seconds)


def _state_of_receipt(receipt: ShardReceipt) -> ShardState:
    return ShardState(receipt.rows, sum(receipt.failed.values()), receipt.seconds)


@dataclass(frozen=True)
class EncodeWorker:
    """Worker of an engine. Each call encodes one shard."""

    encoder: Any

    def __call__(
        self, task: ShardTask, on_report: Callable[[StageProgress], None], should_stop: ShouldStop
    ) -> ShardReceipt:
        from edje_index.indexing.shard_encoding import EncodingInterrupted, encode_shard
        from pipelines.engines.ray_engine import worker_machine

        machine, alive = worker_machine()
        try:
            return encode_shard(task, self.encoder, on_report, should_stop, machine=machine, alive=alive)
        except EncodingInterrupted as error:
            raise TaskInterrupted from error


def open_worker(bundle: str, device: str, threads: int, dtype: str) -> Worker:
    """Load the encoder and return a worker that encodes shards."""
    from edje_index.indexing.image_encoder import ImageEncoder

    return EncodeWorker(ImageEncoder.open(bundle, device=device, threads=threads, dtype=dtype))
