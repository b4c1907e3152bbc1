"""Training on several workers with Ray Train.

The workers and this process communicate through files in the run folder. Every node
needs access to this folder.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipelines.engines.base import EngineUnavailableError, describe_error
from pipelines.engines.ray_engine import best_device, connected_ray
from pipelines.progress.events import JobStopped, OnEvent
from storage_formats.atomic import Json
from storage_formats.errors import EdjeError, TaskInterrupted

if TYPE_CHECKING:
    from edje_index.training.loop import TrainTask

_STOP_FILE = "stop"
_RAY_FOLDER = "ray"
_POLL_SECONDS = 0.5
_END_SECONDS = 30
# If a worker dies, all workers restart from the last checkpoint. This is the largest
# number of restarts.
_RESTARTS = 2


def train_on_ray(
    task: TrainTask,
    should_stop: Callable[[], bool],
    on_record: Callable[[Json], None],
    *,
    on_event: OnEvent,
) -> None:
    """Train `task` on several worker processes, which communicate by NCCL or Gloo.

    If a worker or its node is lost, all workers start again from the last checkpoint,
    at most two times.

    Args:
        should_stop: called about twice per second; returns True to stop.
        on_record: called with the newest record of the training log, whenever there are
            new records.
        on_event: called with messages about nodes that join or leave the cluster.

    Raises:
        JobStopped: `should_stop()` returned True. The last checkpoint then contains all
            finished steps. Also raised if the local Ray died, or if the cluster had no
            room for all workers for ten minutes. The last checkpoint may then
            lack the latest steps.
        UsageError: the cluster cannot run the requested number of workers at the same
            time.
        EdjeError: Ray or the training run failed; the message gives the reason.
    """
    from edje_index.training.checkpoints import read_log

    run = task.config.run
    run_dir = run.folder
    cpus = run.threads or 1
    device = run.device
    if device == "auto":
        device = best_device(run.address)
    gpus = int(device == "cuda")
    stop_file = run_dir / _STOP_FILE
    stop_file.unlink(missing_ok=True)
    errors: list[BaseException] = []
    fit = threading.Thread(target=_fit, args=(task, cpus, gpus, errors), daemon=True)
    try:
        with connected_ray(
            run.address,
            workers=run.workers,
            cpus=cpus,
            gpus=gpus,
            min_workers=run.workers,
        ) as cluster:
            fit.start()
            try:
                shown = 0
                while fit.is_alive():
                    fit.join(_POLL_SECONDS)
                    try:
                        cluster.refresh(on_event)
                    except EdjeError as error:
                        raise JobStopped(
                            f"{error}; the last checkpoint is kept, so training can be"
                            " resumed"
                        ) from error
                    if should_stop():
                        stop_file.touch()
                    records = read_log(run_dir)
                    if len(records) > shown:
                        on_record(records[-1])
                    shown = len(records)
            finally:
                # Wait for the thread: if it is inside Ray, the shutdown of Ray can
                # crash.
                fit.join(_END_SECONDS)
    except EngineUnavailableError as unavailable:
        # The advice of EngineUnavailableError, to use another engine, does not apply:
        # only Ray can train on several workers.
        raise EdjeError(str(unavailable)) from unavailable.__cause__
    finally:
        shutil.rmtree(run_dir / _RAY_FOLDER, ignore_errors=True)
    if errors:
        first_error = errors[0]
        # Find the original error of the worker inside the Ray errors that wrap it.
        failures = getattr(first_error, "worker_failures", None)
        inner = next(iter(failures.values())) if failures else first_error
        while (cause := getattr(inner, "cause", None) or inner.__cause__) is not None:
            inner = cause
        if isinstance(first_error, EdjeError):
            raise first_error
        raise EdjeError(
            f"training on Ray failed: {describe_error(inner)}"
        ) from first_error
    if stop_file.exists():
        stop_file.unlink()
        raise JobStopped(
            "the training run stopped; the last checkpoint contains all finished steps"
        )


def _fit(
    task: TrainTask,
    cpus: int,
    gpus: int,
    errors: list[BaseException],
) -> None:
    """Train with Ray Train. This runs in a thread, so an error is not raised but added
    to `errors`.
    """
    try:
        try:
            from ray.train import FailureConfig, RunConfig, ScalingConfig
            from ray.train.torch import TorchConfig, TorchTrainer
        except ImportError as error:
            raise EdjeError(
                "training on Ray needs Ray Train; run: pip install 'edje-index[train]'"
            ) from error
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        trainer = TorchTrainer(
            _worker_loop,
            train_loop_config={"task": task},
            torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=task.config.run.workers,
                use_gpu=gpus > 0,
                resources_per_worker={"CPU": cpus, "GPU": gpus},
            ),
            run_config=RunConfig(
                # A new name for each run, so that Ray Train itself resumes nothing. The
                # training loop resumes from its own checkpoints.
                name=uuid.uuid4().hex,
                storage_path=str(task.config.run.folder / _RAY_FOLDER),
                failure_config=FailureConfig(max_failures=_RESTARTS),
            ),
        )
        trainer.fit()
    except BaseException as error:
        errors.append(error)


def _worker_loop(config: Json) -> None:
    """Run the training steps of one Ray worker."""
    import ray.train

    from edje_index.training.loop import run_worker
    from edje_index.training.workers import WorkerGroup, patient_group

    task: TrainTask = config["task"]
    context = ray.train.get_context()
    rank = context.get_world_rank()
    group = WorkerGroup(rank, context.get_world_size(), patient_group())
    with contextlib.suppress(TaskInterrupted):
        run_worker(task, group, (task.config.run.folder / _STOP_FILE).exists)
