"""Training on several workers by Ray Train: the same function of a rank, in a process group that Ray sets up.

The only module that imports Ray Train. What the group tell goes through the run folder, which every node must see:
the log that rank 0 writes, the checkpoints that a restarted group goes on from, and a file that asks for a stop.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engines.base import describe_error
from pipelines.engines.ray_engine import connected_ray
from pipelines.progress.stopping import JobStopped
from storage_formats.errors import EdjeError

if TYPE_CHECKING:
    from edje_index.training.loop.train_worker import TrainTask

STOP_FILE = "stop"
RAY_FOLDER = "ray"
_POLL_SECONDS = 0.5
_RESTARTS = 2  # of the whole group, from the last checkpoint, when a worker dies


def train_on_ray(
    task: TrainTask,
    workers: int,
    address: str | None,
    should_stop: Callable[[], bool],
    on_record: Callable[[dict[str, Any]], None],
) -> None:
    """Train `task` on `workers` group: NCCL on GPUs, one each, else Gloo.

    Raises:
        JobStopped: `should_stop()` turned true; all that was done is in the last checkpoint.
        EdjeError: Ray, or the training on it, failed; the message says why.
    """
    from pipelines.planning.machine import cuda_devices

    stop = task.runtime.run_dir / STOP_FILE
    stop.unlink(missing_ok=True)
    gpus = 1 if task.runtime.device == "cuda" or (task.runtime.device == "auto" and cuda_devices()) else 0
    needs = {"CPU": task.runtime.threads or 1, "GPU": gpus}
    with connected_ray(address, {name: need * workers for name, need in needs.items()}):
        failures: list[BaseException] = []
        thread = threading.Thread(target=_fit, args=(task, workers, needs, failures), daemon=True)
        thread.start()
        seen = 0
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if should_stop():
                stop.touch()
            seen = _pass_on(task.runtime.run_dir, seen, on_record)
    shutil.rmtree(task.runtime.run_dir / RAY_FOLDER, ignore_errors=True)
    if failures and isinstance(failures[0], ImportError):
        raise EdjeError("training on Ray needs Ray Train: pip install 'edje-index[train]'") from failures[0]
    if failures:
        raise EdjeError(f"training on Ray failed: {_cause(failures[0])}") from failures[0]
    if stop.exists():
        stop.unlink()
        raise JobStopped("stopped; the last checkpoint holds all that was done")


def _fit(task: TrainTask, workers: int, needs: dict[str, int], failures: list[BaseException]) -> None:
    """Run Ray's trainer to its end, in a thread of its own: it takes no question in between."""
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        trainer = TorchTrainer(
            _worker_loop,
            train_loop_config={"task": task},
            torch_config=TorchConfig(backend="nccl" if needs["GPU"] else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu=bool(needs["GPU"]),
                resources_per_worker={name: need for name, need in needs.items() if need},
            ),
            run_config=RunConfig(
                name=uuid.uuid4().hex,  # nothing of Ray's own is gone on from
                storage_path=str(task.runtime.run_dir / RAY_FOLDER),
                failure_config=FailureConfig(max_failures=_RESTARTS),
            ),
        )
        trainer.fit()
    except BaseException as error:  # it is raised again by the thread that waits
        failures.append(error)


def _worker_loop(config: dict[str, Any]) -> None:
    """What each of Ray's workers runs."""
    from edje_index.training.loop.distributed import WorkerGroup
    from edje_index.training.loop.train_worker import run_worker
    from edje_index.training.loop.training_loop import TrainingStopped

    task: TrainTask = config["task"]
    with contextlib.suppress(TrainingStopped):
        run_worker(task, WorkerGroup.of_process_group(), (task.runtime.run_dir / STOP_FILE).exists)


def _pass_on(run_dir: Path, seen: int, on_record: Callable[[dict[str, Any]], None]) -> int:
    """Show the newest line of the log, where there is a new one; returns the number of lines."""
    from edje_index.training.loop.log import read_log

    records = read_log(run_dir)
    if len(records) > seen:
        on_record(records[-1])
    return len(records)


def _cause(error: BaseException) -> str:
    """What a worker said, out of the errors that Ray wraps around it."""
    failures = getattr(error, "worker_failures", None)
    inner = next(iter(failures.values())) if failures else error
    while (cause := getattr(inner, "cause", None) or inner.__cause__) is not None:
        inner = cause
    return describe_error(inner)
