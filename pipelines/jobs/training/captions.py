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

from pipelines.engines.base import TaskInterrupted, Worker, describe_error, open_engine
from pipelines.jobs.plan import default_device, default_threads
from pipelines.jobs.shard_run import run_shards
from pipelines.progress.events import JobStopped, OnEvent, Progress, ShardState, ShouldStop, StatusMessage
from pipelines.progress.wording import counted
from storage_formats.atomic import make_directories
from storage_formats.cpus import usable_cpus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edje_index.progress import OnProgress
    from edje_index.training.captions import CaptionModels, CaptionSet, CaptionTask
    from edje_index.training.config import RunSettings
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.receipts import ShardReceipt

_VERSION = 1  # of the rules by which a plan determines the files of the shards


def prepare_captions(
    folder: Path,
    captions: CaptionSet,
    bundle: Path,
    miner: Path | None,
    mining: tuple[CommittedIndex, NDArray[np.int64]],
    run: RunSettings,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> None:
    """Prepare the captions that earlier calls did not prepare, and write the `TrainingData`.

    Args:
        folder: directory of the `TrainingData` to write. It appears when it is complete. Until then, the directory
            `.NAME.part` beside it keeps the finished shards. An existing `folder` is kept as it is.
        captions: captioned images, at least one.
        bundle: bundle with the tokenizer of the joint encoder and the text tower.
        miner: bundle of the model that mines hard negatives; None if the text tower of `bundle` mines them.
        mining: index that stores the image embeddings of the mining model, and the row of each image, int64 [n].
        run: hardware settings.
        on_event: called with each progress event.
        should_stop: the preparation stops once `should_stop()` returns True.

    Raises:
        JobStopped: `should_stop()` returned True, a shard failed, or a file cannot be written. Finished shards are
            kept.
        CorruptIndexError: a file of a shard is damaged.
    """
    from edje_index.bundles.info import read_bundle_info
    from edje_index.models.devices import threads_kept
    from edje_index.training import captions as shards
    from storage_formats.change import clear_staging
    from storage_formats.format.layout import Layout
    from storage_formats.format.receipts import read_receipts

    root = folder.with_name(f".{folder.name}.part")
    if folder.exists():
        return shutil.rmtree(root, ignore_errors=True)
    index, rows = mining
    miner = None if miner is None else miner.absolute()  # a worker has another directory
    device = default_device() if run.device == "auto" else run.device
    # On the CPUs of one machine, this process prepares the captions: Ray Train, which then starts Ray again in this
    # process, does not survive the death of that second Ray.
    on_ray = run.address is not None or (run.distributed and device == "cuda")
    threads = run.threads or (default_threads() if on_ray else usable_cpus())
    try:
        make_directories(root / shards.SHARD_FOLDER)
        clear_staging(root)
        digest = shards.write_caption_table(root / shards.CAPTION_TABLE, captions, rows)
        # The fingerprint of everything that determines the data, except the device and the threads.
        bundles = [read_bundle_info(path).fingerprint for path in (bundle, miner) if path is not None]
        content = [_VERSION, digest, bundles, index.manifest.model["fingerprint"]]
        plan = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        count = captions.pairs("captions")
        numbers = range(-(-count // shards.SHARD_CAPTIONS))
        amount = f"{counted(count, 'caption')} in {counted(len(numbers), 'shard')}"
        on_event(StatusMessage(f"preparing {amount}, {counted(run.workers if on_ray else 1, 'worker')} on {device}"))
        gpus = 1 if device == "cuda" else 0
        finished = run_shards(
            "preparing captions",
            numbers,
            count,
            read_receipts(Layout(root), numbers, plan),
            engine=open_engine(
                "ray" if on_ray else "inline", run.workers, cpus=threads, gpus=gpus, address=run.address
            ),
            make_worker=functools.partial(open_worker, bundle, miner, index, device=device, threads=threads),
            make_task=lambda shard: shards.CaptionTask(str(root), shard, plan),
            on_event=on_event,
            should_stop=should_stop,
            unit="caption",
        )
        with threads_kept():
            receipts = sorted(finished, key=lambda receipt: receipt.shard)
        shards.join_shards(root, receipts, captions, folder, stoppable_progress(on_event, should_stop))
    except OSError as error:
        raise JobStopped(f"cannot write {folder}: {describe_error(error)}; finished shards are kept") from error
    shutil.rmtree(root, ignore_errors=True)


def stoppable_progress(on_event: OnEvent, should_stop: ShouldStop) -> OnProgress:
    """Return a callback that reports progress and raises JobStopped once `should_stop()` returns True."""

    def progress(activity: str, done: int, total: int) -> None:
        if should_stop():
            raise JobStopped(
                f"stopped while {activity}, after {done:,} of {total:,}; run the command again to continue"
            )
        on_event(Progress(activity, done, total))

    return progress


@dataclass(frozen=True)
class CaptionWorker:
    """Worker of an engine. Each call prepares one shard of captions."""

    models: CaptionModels

    def __call__(self, task: CaptionTask, on_report: Callable[[Any], None], should_stop: ShouldStop) -> ShardReceipt:
        from edje_index.training.captions import prepare_shard

        def report(done: int) -> None:
            if should_stop():
                raise TaskInterrupted
            on_report((task.shard, ShardState(done)))

        return prepare_shard(task, self.models, report)


def open_worker(bundle: Path, miner: Path | None, mining_index: CommittedIndex, *, device: str, threads: int) -> Worker:
    """Load the models and return a worker that prepares shards of captions."""
    from edje_index.training.captions import CaptionModels

    return CaptionWorker(CaptionModels.open(bundle, miner, mining_index, device=device, threads=threads))
