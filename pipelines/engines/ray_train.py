"""Training on several workers with Ray Train.

The workers and this process communicate through files in the run folder. Every node needs access to this folder.
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

from pipelines.engines.base import EngineUnavailableError, describe_error
from pipelines.engines.ray_cluster import RayDied, connected_ray
from pipelines.engines.ray_nodes import NODE_WAIT_SECONDS, RayNodes
from pipelines.progress.events import JobStopped
from storage_formats.errors import EdjeError, UsageError

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

    from edje_index.training.task import TrainTask

STOP_FILE = "stop"
RAY_FOLDER = "ray"
_POLL_SECONDS = 0.5
_RESTARTS = 2  # if a worker dies, the whole group restarts from the last checkpoint


def train_on_ray(
    task: TrainTask,
    should_stop: Callable[[], bool],
    on_record: Callable[[dict[str, Any]], None],
    *,
    on_notice: Callable[[str], None] = lambda message: None,
    node_wait_seconds: float = NODE_WAIT_SECONDS,
) -> None:
    """Train `task` on several worker processes, which communicate by NCCL or Gloo.

    If a worker or its node is lost, all workers start again from the last checkpoint.

    Args:
        task: what to train.
        should_stop: returns True to stop.
        on_record: called with new records of the log.
        on_notice: called with news about the nodes of the cluster.
        node_wait_seconds: seconds to wait for a new node if the cluster no longer has room for all workers.

    Raises:
        JobStopped: `should_stop()` returned True; the last checkpoint contains all finished steps. Also raised if the
            local Ray died or the cluster lost nodes; the last checkpoint is then kept.
        UsageError: the cluster cannot run the requested number of workers at the same time.
        EdjeError: Ray or the training run failed; the message gives the reason.
    """
    workers, cpus, gpus = task.config.run.workers, task.config.run.threads or 1, _gpus(task)
    stop_file = task.config.run.folder / STOP_FILE
    stop_file.unlink(missing_ok=True)
    try:
        with connected_ray(task.config.run.address, cpus=cpus * workers, gpus=gpus * workers) as cluster:
            if (room := cluster.room(cpus=cpus, gpus=gpus)) < workers:
                raise UsageError(f"the Ray cluster has room for only {room} of {workers} workers; use fewer workers")
            nodes = RayNodes(cluster, cpus=cpus, gpus=gpus, min_workers=workers, wait_seconds=node_wait_seconds)
            fit = _Fit(_make_trainer(task, cpus=cpus, gpus=gpus))
            records_shown = 0
            while fit.is_alive():
                fit.join(_POLL_SECONDS)
                cluster.check_alive()
                _report_nodes(nodes, on_notice)
                if should_stop():
                    stop_file.touch()
                records_shown = _show_new_record(task.config.run.folder, records_shown, on_record)
    except RayDied as died:
        raise JobStopped(f"{died}; the last checkpoint is kept, so the training run can be resumed") from died
    except EngineUnavailableError as unavailable:  # no other engine can train on several workers
        raise EdjeError(str(unavailable)) from unavailable.__cause__
    finally:
        shutil.rmtree(task.config.run.folder / RAY_FOLDER, ignore_errors=True)
    if fit.error is not None:
        raise EdjeError(f"training on Ray failed: {_cause(fit.error)}") from fit.error
    if stop_file.exists():
        stop_file.unlink()
        raise JobStopped("the training run stopped; the last checkpoint contains all finished steps")


def _report_nodes(nodes: RayNodes, on_notice: Callable[[str], None]) -> None:
    """Pass news about the nodes to `on_notice`. Raise JobStopped if too few nodes are left."""
    try:
        for notice in nodes.refresh():
            on_notice(notice.message)
    except EdjeError as error:
        raise JobStopped(f"{error}, or use fewer workers; the last checkpoint is kept") from error


def _gpus(task: TrainTask) -> int:
    from pipelines.planning.machine import cuda_devices

    device = task.config.run.device
    return 1 if device == "cuda" or (device == "auto" and cuda_devices()) else 0


def _make_trainer(task: TrainTask, *, cpus: int, gpus: int) -> TorchTrainer:
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise EdjeError("training on Ray needs the package Ray Train; run: pip install 'edje-index[train]'") from error
    logging.getLogger("ray.train").setLevel(logging.CRITICAL)
    return TorchTrainer(
        _worker_loop,
        train_loop_config={"task": task},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=task.config.run.workers,
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": cpus, **({"GPU": gpus} if gpus else {})},
        ),
        run_config=RunConfig(
            name=uuid.uuid4().hex,  # a new name, because a run resumes from our own checkpoints
            storage_path=str(task.config.run.folder / RAY_FOLDER),
            failure_config=FailureConfig(max_failures=_RESTARTS),
        ),
    )


class _Fit(threading.Thread):
    """Thread that runs `trainer.fit()`. The attribute `error` is the exception that `fit` raised, or None."""

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(daemon=True)
        self._trainer = trainer
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self.error = error


def _worker_loop(config: dict[str, Any]) -> None:
    """Run the training steps of one Ray worker."""
    import ray.train

    from edje_index.training.loop import TrainingStopped, run_worker
    from edje_index.training.task import WorkerGroup

    task: TrainTask = config["task"]
    context = ray.train.get_context()
    group = WorkerGroup(context.get_world_rank(), context.get_world_size(), context.get_local_world_size())
    with contextlib.suppress(TrainingStopped):
        run_worker(task, group, (task.config.run.folder / STOP_FILE).exists)


def _show_new_record(run_dir: Path, records_shown: int, on_record: Callable[[dict[str, Any]], None]) -> int:
    """Pass the newest record of the log to `on_record`. Return the number of records in the log."""
    from edje_index.training.checkpoints import read_log

    records = read_log(run_dir)
    if len(records) > records_shown:
        on_record(records[-1])
    return len(records)


def _cause(error: BaseException) -> str:
    """Return the original error of the worker in one line, without the Ray errors that wrap it."""
    failures = getattr(error, "worker_failures", None)
    inner = next(iter(failures.values())) if failures else error
    while (cause := getattr(inner, "cause", None) or inner.__cause__) is not None:
        inner = cause
    return describe_error(inner)
