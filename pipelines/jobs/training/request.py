"""Inputs, output and hardware of a training run. `edje_index.training.config` defines what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from edje_index.training.config import Settings, TrainConfig
from storage_formats.errors import UsageError

SettingPath = Annotated[Path, Field(strict=False)]


class TrainingInputs(Settings):
    """Files that a training reads."""

    captions: tuple[SettingPath, ...] = Field(
        min_length=1, strict=False, description="Caption files: JSONL, COCO or Karpathy JSON, Parquet, WebDataset tar."
    )
    images: SettingPath | None = Field(
        default=None,
        description="Base directory of relative image paths. None uses the directory of each caption file.",
    )
    split: str | None = Field(default=None, description="Split of the captions to train on. None takes all.")
    dev: SettingPath | None = Field(
        default=None, description="Captions of other images, to which the weights of the final score are fitted."
    )
    dev_split: str | None = Field(default=None, description="Split of the dev captions to use. None takes all.")
    model: SettingPath | None = Field(default=None, description="Bundle with the frozen towers. Set this or vision.")
    vision: str | None = Field(default=None, description="Name of the frozen towers in open_clip.")
    language: SettingPath | None = Field(
        default=None, description="Initial language model: directory of a Hugging Face BERT, or a bundle."
    )
    init: SettingPath | None = Field(
        default=None,
        description="Bundle that provides the initial joint encoder, and the adapter if it has the same sizes.",
    )
    features: SettingPath | None = Field(default=None, description="Index of the tower's features. None computes it.")
    view_features: SettingPath | None = Field(
        default=None,
        description="Index of the features of augmented views, views.edje of another run. None computes it.",
    )
    teacher: SettingPath | None = Field(default=None, description="Bundle to distil from.")
    teacher_features: SettingPath | None = Field(
        default=None, description="Index built by the teacher, or of its tower's features. None uses the features."
    )
    miner: SettingPath | None = Field(
        default=None, description="Bundle whose embeddings mine hard negatives. None uses the frozen towers."
    )
    miner_features: SettingPath | None = Field(
        default=None, description="Index built by the mining model. None computes it."
    )


class RunSettings(Settings):
    """Output, hardware and checkpoints. None of these changes what is trained, up to rounding."""

    out: SettingPath = Field(description="Directory of the bundle to write.")
    dir: SettingPath | None = Field(default=None, description="Run folder: checkpoints and log. None is OUT.run.")
    workers: int = Field(default=1, ge=1, description="Worker processes. More than one run on Ray.")
    address: str | None = Field(
        default=None,
        description="Head of a Ray cluster, HOST:PORT. Every node must see the run folder. None starts Ray here.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Device to train on.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads per worker. None is torch's choice.")
    checkpoint_every: int = Field(default=200, ge=1, description="Steps between checkpoints.")
    log_every: int = Field(default=10, ge=1, description="Steps between log lines.")
    compile: bool = Field(default=False, description="Use torch.compile.")
    evaluate_every: int | None = Field(
        default=None,
        ge=0,
        description="Steps between evaluations on the dev captions. None evaluates after every epoch, 0 never.",
    )
    keep_best: int = Field(
        default=0, ge=0, description="Checkpoints with the highest dev recall to keep, beside the last two."
    )
    keep_all: bool = Field(default=False, description="Keep all checkpoints, those of evaluations included.")
    export: bool = Field(default=False, description="Write the bundle of the last checkpoint without training further.")
    step: int | None = Field(default=None, ge=1, description="With export, the step of a kept checkpoint to write.")

    @property
    def folder(self) -> Path:
        """The run folder as an absolute path."""
        return (self.dir or self.out.with_name(f"{self.out.name}.run")).absolute()

    @property
    def distributed(self) -> bool:
        """Whether the job runs on Ray."""
        return self.workers > 1 or self.address is not None


class TrainRequest(Settings):
    """A request to train a model bundle."""

    inputs: TrainingInputs
    run: RunSettings


def check_request(request: TrainRequest, config: TrainConfig) -> None:
    """Raise UsageError, with one line per problem, if settings exclude each other."""
    inputs, objective, fitting, loop = request.inputs, config.objective, config.fitting, config.loop
    no_loss = inputs.teacher is None and not objective.itm_weight + objective.mlm_weight + objective.recovery_weight
    problems = {
        "inputs.model and inputs.vision: set one of them, the frozen towers": (
            (inputs.model is None) == (inputs.vision is None)
        ),
        "loop.steps or loop.epochs is missing: the length of the training": loop.steps is None and loop.epochs is None,
        f"loop.batch_size is {loop.batch_size} and run.workers is {request.run.workers}; the batch size must be a "
        "multiple of the number of workers": loop.batch_size % request.run.workers != 0,
        "all losses have weight 0 and inputs.teacher is not set; there is nothing to train": no_loss,
        "fitting.pooled_dim needs inputs.dev or fitting.pooled_weight; otherwise the weight would be 0": (
            fitting.pooled_dim > 0 and inputs.dev is None and not fitting.pooled_weight
        ),
        "fitting.hubness_bank needs inputs.dev, to whose captions its weight is fitted": (
            fitting.hubness_bank > 0 and inputs.dev is None
        ),
        "run.keep_best needs inputs.dev, on whose captions checkpoints are compared": (
            request.run.keep_best > 0 and inputs.dev is None
        ),
        "run.step needs run.export": request.run.step is not None and not request.run.export,
        "inputs.view_features needs augmentation.views, the number of views per photo": (
            inputs.view_features is not None and not config.augmentation.views
        ),
    }
    if lines := [line for line, is_problem in problems.items() if is_problem]:
        raise UsageError("\n".join(lines))
