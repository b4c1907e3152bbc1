"""The build job: prepare a plan, encode every shard, build the nearest-neighbour index, publish."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engines.base import Engine, TaskInterrupted, Worker, describe_error
from pipelines.jobs.build_result import BuildResult, build_result
from pipelines.jobs.lock import locked_index
from pipelines.jobs.publish_build import publish_build
from pipelines.jobs.shard_run import ShardJob, ShardRun, read_receipts, run_shards
from pipelines.planning.config import BuildConfig
from pipelines.planning.finished import check_finished
from pipelines.planning.inputs import check_frozen_inputs
from pipelines.planning.output import check_output
from pipelines.planning.prepare import PreparedBuild, prepare_build
from pipelines.progress.events import OnEvent, PlanReady
from pipelines.progress.meter import ShardState
from pipelines.progress.stopping import JobStopped, ShouldStop
from storage_formats.cpus import usable_cpus
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from edje_index.indexing.shard_encoding import ShardTask, StageProgress
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.receipts import ShardReceipt

_MAX_DECODE_THREADS = 16


def run_build(config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> BuildResult:
    """Build the index that `config` describes. An unfinished index is resumed; a finished one is only checked.

    Raises:
        UsageError: the request cannot be served.
        ModelError: the model bundle cannot be used.
        JobStopped: the build ended early; run it again to resume it.
        EdjeError: another process is working on the index, or no input could be indexed.
    """
    from storage_formats.format.manifest import Manifest

    started = time.monotonic()
    check_output(config)
    is_finished = Layout(config.out).manifest.exists
    with contextlib.nullcontext() if is_finished() else locked_index(config.out):
        run = None
        if is_finished():  # again: another process may have finished it before this one held the lock
            manifest = Manifest.load(config.out)
            check_finished(config, manifest, should_stop)
            _remove_leftovers(config.out)
        else:
            prepared = prepare_build(config, on_event, should_stop)
            run, manifest = _encode(prepared, _engine(config, prepared), on_event, should_stop)
    return build_result(manifest, run, time.monotonic() - started)


def _remove_leftovers(root: Path) -> None:
    """Remove `build/` of a finished index if its build was killed before it could do so."""
    from storage_formats.writing.publish import has_build_leftovers, remove_build

    layout = Layout(root)
    with contextlib.suppress(OSError, EdjeError):  # it is read-only, or another process is at work
        if has_build_leftovers(layout):
            with locked_index(root):
                remove_build(layout)


def _encode(
    prepared: PreparedBuild, engine: Engine, on_event: OnEvent, should_stop: ShouldStop
) -> tuple[ShardRun, Manifest]:
    """Encode the shards that earlier runs did not finish, and publish the index."""
    from storage_formats.writing.publish import begin_index, clear_staging

    plan, job = prepared.plan, _shard_job(prepared)
    receipts = read_receipts(plan.root, plan.spec, plan.fingerprint)
    check_frozen_inputs(plan, (shard for shard in range(plan.spec.shards) if shard not in receipts))
    on_event(
        PlanReady(plan.spec.rows, plan.spec.shards, len(receipts), prepared.workers, plan.duplicates, plan.ignored)
    )
    try:
        clear_staging(plan.root)
        begin_index(plan.root, plan.spec)
        run = run_shards(job, receipts, engine, on_event, should_stop)
        return run, publish_build(plan, run.receipts, max_failed=prepared.max_failed, on_event=on_event)
    except OSError as error:
        raise JobStopped(f"cannot write {plan.root}: {describe_error(error)}; finished shards are kept") from error


def _engine(config: BuildConfig, prepared: PreparedBuild) -> Engine:
    if config.engine == "inline":
        from pipelines.engines.inline import InlineEngine

        return InlineEngine()
    from pipelines.engines.ray_engine import RayEngine

    settings = prepared.plan.settings
    gpus = 1 if settings.device == "cuda" else 0
    return RayEngine(prepared.workers, cpus=settings.threads, gpus=gpus, address=config.address)


def _shard_job(prepared: PreparedBuild) -> ShardJob:
    plan, settings = prepared.plan, prepared.plan.settings
    return ShardJob(
        activity="indexing",
        spec=plan.spec,
        make_worker=functools.partial(
            open_worker, str(plan.model["bundle"]), settings.device, settings.threads, settings.dtype
        ),
        make_task=functools.partial(_shard_task, prepared),
        state_of_report=_state_of_report,
        state_of_receipt=_state_of_receipt,
    )


def _shard_task(prepared: PreparedBuild, shard: int) -> ShardTask:
    from edje_index.indexing.shard_encoding import ShardTask

    plan = prepared.plan
    return ShardTask(
        root=str(plan.root.absolute()),
        shard=shard,
        spec=plan.spec,
        plan=plan.fingerprint,
        batch_size=plan.settings.batch_size,
        max_pixels=plan.settings.max_pixels,
        decode_threads=_decode_threads(prepared),
    )


def _decode_threads(prepared: PreparedBuild) -> int:
    """Decoding threads per worker. On a CPU, the model's own threads leave room for only as many."""
    settings = prepared.plan.settings
    threads = settings.threads if settings.device == "cpu" else usable_cpus() // (prepared.workers or 1)
    return min(max(1, threads), _MAX_DECODE_THREADS)


def _state_of_report(progress: StageProgress) -> tuple[int, ShardState]:
    seconds = {"wait": progress.wait, "encode": progress.encode, "write": progress.write}
    return progress.shard, ShardState(progress.done, progress.failed, seconds)


def _state_of_receipt(receipt: ShardReceipt) -> ShardState:
    return ShardState(receipt.rows, sum(receipt.failed.values()), receipt.seconds)


@dataclass(frozen=True)
class EncodeWorker:
    """A worker of `pipelines.engines`: encodes one shard after another with one encoder."""

    encoder: Any

    def __call__(
        self, task: ShardTask, on_report: Callable[[StageProgress], None], should_stop: ShouldStop
    ) -> ShardReceipt:
        from edje_index.indexing.shard_encoding import EncodingInterrupted, encode_shard

        try:
            return encode_shard(task, self.encoder, on_report, should_stop)
        except EncodingInterrupted as error:
            raise TaskInterrupted from error


def open_worker(bundle: str, device: str, threads: int, dtype: str) -> Worker:
    """Load the encoder into this process."""
    from edje_index.indexing.image_encoder import ImageEncoder

    return EncodeWorker(ImageEncoder.open(bundle, device=device, threads=threads, dtype=dtype))
