"""What a train worker needs, as plain values that travel to other processes. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edje_index.training.config import TrainConfig
from storage_formats.format.manifest import CommittedIndex

if TYPE_CHECKING:
    from edje_index.training.data.dataset import DevCaptions


@dataclass(frozen=True)
class Runtime:
    """How a training runs. None of it changes what is trained, up to rounding.

    Attributes:
        run_dir: folder of checkpoints and log.
        device: "auto", "cpu" or "cuda".
        threads: CPU threads of torch; None leaves its setting unchanged.
        checkpoint_every, log_every: steps between checkpoints, and between log records.
        compile: whether to use torch.compile.
        workers: worker processes; more than one run on Ray.
        address: head of a Ray cluster; None starts Ray on this machine if it is needed.
        evaluate_every: steps between evaluations on the dev captions; None evaluates after every epoch, 0 never.
        keep_best: checkpoints with the highest dev recall that are kept, beside the last two.
        keep_all: whether all checkpoints are kept.
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
    """The teacher of a distillation.

    Attributes:
        bundle: its bundle.
        index: holds its tokens, or features for its adapter.
        rows: file of the row of each training image in the index, int64 [n].
    """

    bundle: Path
    index: CommittedIndex
    rows: Path


@dataclass(frozen=True)
class ViewTask:
    """Features of augmented views.

    Attributes:
        index: holds the features.
        rows: file of the rows of each training image's views, int64 [n, views]; -1 for a missing view.
    """

    index: CommittedIndex
    rows: Path


@dataclass(frozen=True)
class TrainTask:
    """Everything that a worker needs.

    Attributes:
        config: what to train.
        runtime: how to run.
        run: fingerprint of everything that decides the training.
        start: bundle of the first step.
        features: index of the features that the adapter is trained on.
        data: folder of a `TrainingData`.
        temperature: temperature of the softmax that mines negatives; 0 takes the most similar.
        steps: optimiser steps of the joint phase.
        teacher: the teacher; None without distillation.
        new_adapter: whether the adapter of the first step is untrained.
        views: augmented views; None without any.
        dev: captions that are not trained on; None without any.
    """

    config: TrainConfig
    runtime: Runtime
    run: str
    start: Path
    features: CommittedIndex
    data: Path
    temperature: float
    steps: int
    teacher: TeacherTask | None = None
    new_adapter: bool = True
    views: ViewTask | None = None
    dev: DevCaptions | None = None
