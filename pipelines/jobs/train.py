"""The train job: everything that a training needs is made once in its run folder, then it runs, then the bundle."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.jobs.lock import locked_index
from pipelines.jobs.train_finish import RESULT, finish_training
from pipelines.jobs.train_inputs import check_captions, prepare_training
from pipelines.jobs.train_request import TrainRequest, TrainResult
from pipelines.jobs.train_settings import RUN_FILE, begin_run
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import JobStopped, ShouldStop
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.config import TrainConfig
    from edje_index.training.loop.train_worker import TrainTask

_REPORT_SECONDS = 5.0


def run_training(
    request: TrainRequest, config: TrainConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False
) -> TrainResult:
    """Train what was asked for; resume what was begun with the same settings.

    Raises:
        UsageError, ModelError: the request cannot be served.
        JobStopped: stopped before its end; running it again resumes it.
    """
    started = time.monotonic()
    with locked_index(request.run_folder):
        if request.export and not (request.run_folder / "checkpoints").is_dir():
            raise UsageError(
                f"{request.run_folder} holds no checkpoint to export; is it the --run-dir of the training?"
            )
        if not (request.run_folder / RUN_FILE).exists():  # before anything is written that other settings would not fit
            check_captions(request)
        run = begin_run(request, config)
        if (finished := _finished(request, config, run)) is not None:
            return finished
        if request.out.exists():
            raise UsageError(f"{request.out} exists already: give another --out, or remove it")
        prepared = prepare_training(request, config, run, on_event, should_stop)
        if not request.export:
            _train(prepared.task, request, on_event, should_stop)
        return finish_training(request, config, prepared, on_event, should_stop, started)


def _finished(request: TrainRequest, config: TrainConfig, run: str) -> TrainResult | None:
    path = request.run_folder / RESULT
    if not path.exists() or not request.out.exists():
        return None
    result = TrainResult(**json.loads(path.read_text()))
    if result.run != run or result.bundle != str(request.out) or _fingerprint(request.out) != result.fingerprint:
        return None
    if result.selection and result.selection != asdict(config.selection):
        raise UsageError(
            f"{request.out} was finished with other settings of the final score; remove it to have it made anew from "
            "the last checkpoint, or give another --out"
        )
    return replace(result, already_finished=True)


def _fingerprint(bundle: Path) -> str | None:
    """Of the bundle that is there; None where it is none."""
    from edje_index.bundles.info import read_bundle_info
    from edje_index.errors import ModelError

    try:
        return read_bundle_info(bundle).fingerprint
    except ModelError:
        return None


def _train(task: TrainTask, request: TrainRequest, on_event: OnEvent, should_stop: ShouldStop) -> None:
    from edje_index.training.loop.distributed import WorkerGroup
    from edje_index.training.loop.train_worker import check_world, run_worker
    from edje_index.training.loop.training_loop import TrainingStopped

    check_world(task.config, request.workers)
    report = progress_report(on_event)
    try:
        if request.workers == 1 and request.address is None:
            run_worker(task, WorkerGroup(), should_stop, report)
        else:
            from pipelines.engines.ray_train import train_on_ray

            train_on_ray(task, request.workers, address=request.address, should_stop=should_stop, on_record=report)
    except TrainingStopped as error:
        raise JobStopped(str(error)) from error


def progress_report(on_event: OnEvent, clock: Callable[[], float] = time.monotonic) -> Callable[[dict[str, Any]], None]:
    """A function that shows a line of the log, not too often; the last one of a phase always."""
    last = -_REPORT_SECONDS
    warned = False

    def report(record: dict[str, Any]) -> None:
        nonlocal last, warned
        if not record.get("tensorboard", True) and not warned:
            warned = True
            on_event(
                StatusMessage(
                    "no TensorBoard log: the package 'tensorboard' is not installed; log.jsonl holds the same"
                )
            )
        if record["step"] == record["steps"] or clock() - last >= _REPORT_SECONDS:
            last = clock()
            on_event(StatusMessage(describe_record(record)))

    return report


def describe_record(record: dict[str, Any]) -> str:
    """A line of the log in words."""
    losses = (name for name in ("loss", "itm", "mlm", "recovery", "distillation", "accuracy") if name in record)
    parts = [f"{record['phase']} {record['step']:,}/{record['steps']:,}"]
    parts += [f"{name} {record[name]:.3f}" for name in losses]
    parts += [f"lr {record['lr']:.2e}", f"{record['images_per_second']:.1f} images/s"]
    parts.append(f"{(record['steps'] - record['step']) * record['step_seconds'] / 60:.0f} min left")
    if record["data_wait"] > 0.1 * record["seconds"]:
        parts.append(f"waiting for data {record['data_wait'] / record['seconds']:.0%} of the time")
    if record["skipped"]:
        parts.append(f"skipped {record['skipped']}")
    return ", ".join(parts)
