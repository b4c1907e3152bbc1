"""The task of a prepared training run: the input of the optimiser steps and of the last stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.training.request import RunSettings, TrainRequest

if TYPE_CHECKING:
    from edje_index.training.loop.task import Runtime, TrainTask
    from pipelines.jobs.training.matching import MatchedCaptions


@dataclass(frozen=True)
class FinishTask:
    """The task of the last stage of a training run, which writes the bundle.

    Attributes:
        out: directory of the bundle to write.
        export: True to write the bundle of a checkpoint without training and without a `result.json`.
        trained_on: description of the training data, for the notes of the bundle.
        images, captions: numbers of training images and training captions.
        left_out: number of images without features, by reason. The entry "blank-caption" counts blank captions.
        truncated: number of training images that could be decoded only in part.
        step: step of the checkpoint to export; None takes the last checkpoint.
    """

    out: Path
    export: bool
    trained_on: str
    images: int
    captions: int
    left_out: dict[str, int]
    truncated: int
    step: int | None

    @classmethod
    def of(cls, request: TrainRequest, matched: MatchedCaptions) -> FinishTask:
        """Return the task of the last stage. `matched` are the captions of `request` whose images have features."""
        inputs, images, captions = request.inputs, len(matched.items), matched.captions.pairs("captions")
        names = ", ".join(path.name for path in inputs.captions)
        teacher = f", distilled from {inputs.teacher.name}" if inputs.teacher else ""
        return cls(
            out=request.run.out,
            export=request.run.export,
            trained_on=f"{images} images with {captions} captions of {names}{teacher}",
            images=images,
            captions=captions,
            left_out=matched.left_out,
            truncated=matched.truncated,
            step=request.run.step,
        )


@dataclass(frozen=True)
class RunTask:
    """The task of a training run.

    Attributes:
        train: task of the optimiser steps.
        finish: task of the last stage.
    """

    train: TrainTask
    finish: FinishTask


def worker_runtime(run: RunSettings) -> Runtime:
    """Return the hardware and checkpoint settings of the workers of a training run."""
    from edje_index.training.loop.task import Runtime

    return Runtime(
        run_dir=run.folder,
        device=run.device,
        threads=run.threads,
        checkpoint_every=run.checkpoint_every,
        log_every=run.log_every,
        compile=run.compile,
        workers=run.workers,
        address=run.address,
        evaluate_every=run.evaluate_every,
        keep_best=run.keep_best,
        keep_all=run.keep_all,
    )
