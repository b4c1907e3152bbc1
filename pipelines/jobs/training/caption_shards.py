"""Prepares the captions of a training run in shards, on an engine."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engines import open_engine
from pipelines.engines.base import Engine, TaskInterrupted, Worker, describe_error
from pipelines.jobs.shard_run import ShardJob, run_shards
from pipelines.jobs.training.progress import stoppable_progress
from pipelines.planning.plan import default_device, default_threads
from pipelines.progress.events import JobStopped, OnEvent, ShardState, ShouldStop, StatusMessage
from pipelines.progress.wording import counted
from storage_formats.atomic import make_directories
from storage_formats.cpus import usable_cpus
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.data.caption_shards import CaptionModels, CaptionTask
    from edje_index.training.data.dataset import CaptionSet
    from pipelines.jobs.training.matching import MiningModel
    from pipelines.jobs.training.request import RunSettings
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.receipts import ShardReceipt

_VERSION = 1  # of the rules by which a plan determines the files of the shards


@dataclass(frozen=True)
class CaptionJob:
    """The captions to prepare.

    Attributes:
        folder: directory of the `TrainingData` to write. It appears when it is complete. Until then, the directory
            `.NAME.part` beside it keeps the finished shards.
        captions: captions of the images to train on.
        bundle: bundle with the tokenizer of the joint encoder and the text tower.
        mining: the model that mines hard negatives.
    """

    folder: Path
    captions: CaptionSet
    bundle: Path
    mining: MiningModel

    @property
    def root(self) -> Path:
        """The working directory."""
        return self.folder.with_name(f".{self.folder.name}.part")

    def plan(self, table_digest: str) -> str:
        """Return the fingerprint of everything that determines the data, except the device and the threads."""
        from edje_index.bundles.info import read_bundle_info

        bundles = [read_bundle_info(path).fingerprint for path in (self.bundle, self.mining.bundle) if path is not None]
        content = [_VERSION, table_digest, bundles, self.mining.index.manifest.model["fingerprint"]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def prepare_captions(job: CaptionJob, run: RunSettings, on_event: OnEvent, should_stop: ShouldStop) -> None:
    """Prepare the captions of `job` that earlier calls did not prepare, and write the `TrainingData`.

    An existing `job.folder` is kept as it is.

    Raises:
        UsageError: there are no captions.
        JobStopped: `should_stop()` returned True, a shard failed, or a file cannot be written. Finished shards are
            kept.
        CorruptIndexError: a file of a shard is damaged.
    """
    if not job.folder.exists():
        if not job.captions.pairs("captions"):
            raise UsageError("no image with a caption has features; give captions of images in the feature index")
        try:
            _write_data(job, run, on_event, should_stop)
        except OSError as error:
            raise JobStopped(f"cannot write {job.folder}: {describe_error(error)}; finished shards are kept") from error
    shutil.rmtree(job.root, ignore_errors=True)


def _write_data(job: CaptionJob, run: RunSettings, on_event: OnEvent, should_stop: ShouldStop) -> None:
    from edje_index.models.devices import threads_kept
    from edje_index.training.data.caption_shards import CAPTION_TABLE, SHARD_FOLDER
    from edje_index.training.data.caption_table import write_caption_table
    from edje_index.training.data.preparation import join_shards
    from storage_formats.format.layout import Layout
    from storage_formats.format.receipts import read_receipts
    from storage_formats.writing.begin import clear_staging

    make_directories(job.root / SHARD_FOLDER)
    clear_staging(job.root)
    plan = job.plan(write_caption_table(job.root / CAPTION_TABLE, job.captions, job.mining.rows))
    device = default_device() if run.device == "auto" else run.device
    on_ray = _uses_ray(run, device)
    threads = run.threads or (default_threads() if on_ray else usable_cpus())
    shard_job = _shard_job(job, plan, device, threads)
    amount = f"{counted(shard_job.rows, 'caption')} in {counted(len(shard_job.shards), 'shard')}"
    on_event(StatusMessage(f"preparing {amount}, {counted(run.workers if on_ray else 1, 'worker')} on {device}"))
    finished = read_receipts(Layout(job.root), shard_job.shards, plan)
    with threads_kept():
        shards = run_shards(shard_job, finished, _engine(run, device, threads, on_ray=on_ray), on_event, should_stop)
    join_shards(job.root, shards.receipts, job.captions, job.folder, stoppable_progress(on_event, should_stop))


def _shard_job(job: CaptionJob, plan: str, device: str, threads: int) -> ShardJob:
    from edje_index.training.data.caption_shards import CaptionTask
    from edje_index.training.data.caption_table import SHARD_CAPTIONS

    captions = job.captions.pairs("captions")
    miner = None if job.mining.bundle is None else job.mining.bundle.absolute()  # a worker has another directory
    return ShardJob(
        activity="preparing captions",
        shards=range(-(-captions // SHARD_CAPTIONS)),
        rows=captions,
        make_worker=functools.partial(open_worker, job.bundle, miner, job.mining.index, device=device, threads=threads),
        make_task=lambda shard: CaptionTask(str(job.root), shard, plan),
        state_of_report=lambda report: (report[0], ShardState(report[1])),
        state_of_receipt=lambda receipt: ShardState(receipt.rows, stage_seconds=receipt.seconds),
        unit="caption",
    )


def _uses_ray(run: RunSettings, device: str) -> bool:
    """Return True if workers on Ray prepare the captions: on a cluster, or on the GPUs of this machine."""
    # Ray Train, which then starts Ray again in this process, does not survive the death of that second Ray.
    return run.address is not None or (run.distributed and device == "cuda")


def _engine(run: RunSettings, device: str, threads: int, *, on_ray: bool) -> Engine:
    gpus = 1 if device == "cuda" else 0
    return open_engine("ray" if on_ray else "inline", run.workers, cpus=threads, gpus=gpus, address=run.address)


@dataclass(frozen=True)
class CaptionWorker:
    """Worker of an engine. Each call prepares one shard of captions."""

    models: CaptionModels

    def __call__(self, task: CaptionTask, on_report: Callable[[Any], None], should_stop: ShouldStop) -> ShardReceipt:
        from edje_index.training.data.caption_shards import prepare_shard

        def report(done: int) -> None:
            if should_stop():
                raise TaskInterrupted
            on_report((task.shard, done))

        return prepare_shard(task, self.models, report)


def open_worker(bundle: Path, miner: Path | None, mining_index: CommittedIndex, *, device: str, threads: int) -> Worker:
    """Load the models and return a worker that prepares shards of captions."""
    from edje_index.training.data.caption_shards import CaptionModels

    return CaptionWorker(CaptionModels.open(bundle, miner, mining_index, device=device, threads=threads))
