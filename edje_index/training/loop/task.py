"""Describes the task of a train worker. Other processes can receive a task, because it contains only plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edje_index.training.config import TrainConfig
from edje_index.training.loop.feature_task import FeatureTask
from storage_formats.format.manifest import CommittedIndex

if TYPE_CHECKING:
    from edje_index.training.data.dataset import DevCaptions


@dataclass(frozen=True)
class Runtime:
    """How a training run is executed. Apart from rounding, these values do not change the trained weights.

    Attributes:
        run_dir: run folder, with the checkpoints and the log.
        device: "auto", "cpu" or "cuda".
        threads: number of CPU threads of torch; None leaves torch's setting unchanged.
        checkpoint_every: number of steps between two checkpoints.
        log_every: number of steps between two log records.
        compile: whether to use torch.compile.
        workers: number of worker processes. Two or more workers run on Ray.
        address: address of a Ray cluster. None starts Ray on this machine if there are two or more workers.
        evaluate_every: number of steps between evaluations on the dev captions. None evaluates after every epoch, and 0
            never evaluates.
        keep_best: number of checkpoints with the highest dev recall to keep. The last two checkpoints are always kept.
        keep_all: whether to keep all checkpoints.
    """

    run_dir: Path
    device: str = "auto"
    threads: int | None = None
    checkpoint_every: int = 200
    log_every: int = 10
    compile: bool = False
    workers: int = 1
    address: str | None = None
    evaluate_every: int | None = None
    keep_best: int = 0
    keep_all: bool = False


@dataclass(frozen=True)
class TeacherTask:
    """Paths of the files of the teacher in distillation.

    Attributes:
        bundle: bundle of the teacher.
        index: index of the teacher's tokens, or of features for the teacher's adapter. None if the teacher's adapter
            reads the features of the batch.
        rows: NumPy file with the row of each training image in `index`, int64 [n]; None without `index`.
    """

    bundle: Path
    index: CommittedIndex | None = None
    rows: Path | None = None


@dataclass(frozen=True)
class TrainTask:
    """Everything that a train worker needs.

    Attributes:
        config: training settings.
        runtime: how the training run is executed.
        run: fingerprint of the settings, data and initial weights of the training run.
        start: path of the bundle with the initial weights.
        features: where to get the features that the adapter is trained on.
        data: folder of the training data, see `preparation.prepare_data`.
        temperature: temperature of the softmax that draws negatives; 0 selects the most similar candidates.
        steps: number of optimiser steps of the joint phase.
        teacher: the teacher; None without distillation.
        new_adapter: True if the adapter in `start` has random weights.
        dev: dev captions; None without dev captions.
    """

    config: TrainConfig
    runtime: Runtime
    run: str
    start: Path
    features: FeatureTask
    data: Path
    temperature: float
    steps: int
    teacher: TeacherTask | None = None
    new_adapter: bool = True
    dev: DevCaptions | None = None
