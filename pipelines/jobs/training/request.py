"""The request for a training run: inputs, output and hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from edje_index.training.config import Settings, TrainConfig
from storage_formats.errors import UsageError

ONLINE = "online"
SettingPath = Annotated[Path, Field(strict=False)]


class TrainingInputs(Settings):
    """Files that a training run reads."""

    captions: tuple[SettingPath, ...] = Field(
        min_length=1, strict=False, description="Caption files: JSONL, COCO or Karpathy JSON, Parquet, WebDataset tar."
    )
    images: SettingPath | None = Field(
        default=None,
        description="Base directory of relative image paths. None uses the directory of each caption file.",
    )
    split: str | None = Field(default=None, description="Split of the captions to train on. None takes all splits.")
    dev: SettingPath | None = Field(
        default=None,
        description="Captions of other images. The weights of the final score are fitted to these captions.",
    )
    dev_split: str | None = Field(default=None, description="Split of the dev captions to use. None takes all splits.")
    model: SettingPath | None = Field(
        default=None, description="Bundle with the frozen towers. Set either inputs.model or inputs.vision."
    )
    vision: str | None = Field(default=None, description="Name of the frozen towers in open_clip.")
    language: SettingPath | None = Field(
        default=None, description="Initial language model: directory of a Hugging Face BERT model, or a bundle."
    )
    init: SettingPath | None = Field(
        default=None,
        description="Bundle with the initial joint encoder. The adapter of the bundle is used too if its sizes match.",
    )
    truncated: Literal["load", "fail"] = Field(
        default="load",
        description="Truncated images. load: train on the part that can be decoded. fail: leave out the image.",
    )
    features: Literal["online"] | SettingPath | None = Field(
        default=None,
        description="Index that stores the features of the vision tower. None computes and stores the features before "
        "the training. online computes the features in every step, and stores no features.",
    )
    feature_precision: Literal["bf16", "fp8", "nvfp4"] = Field(
        default="bf16",
        description="Precision in which the run stores the features. fp8 takes half the disk space of bf16, and nvfp4 "
        "about 28 %. Given features are read in bf16, or else in the first precision of their index.",
    )
    view_features: SettingPath | None = Field(
        default=None,
        description="Index of the features of augmented views, for example views.edje in another run folder. "
        "None computes the features.",
    )
    teacher: SettingPath | None = Field(default=None, description="Bundle of the teacher model, for distillation.")
    teacher_features: SettingPath | None = Field(
        default=None,
        description="Index that the teacher built, or index of the features of the teacher's vision tower. "
        "None uses the index that the adapter is trained on.",
    )
    miner: SettingPath | None = Field(
        default=None, description="Bundle of the mining model for hard negatives. None uses the frozen towers."
    )
    miner_features: SettingPath | None = Field(
        default=None, description="Index that the mining model built. None builds the index."
    )


class RunSettings(Settings):
    """Output, hardware and checkpoints. These settings change the trained weights only by rounding errors."""

    out: SettingPath = Field(description="Directory of the bundle to write.")
    dir: SettingPath | None = Field(
        default=None, description="Run folder for checkpoints and the log. None uses OUT.run."
    )
    workers: int = Field(default=1, ge=1, description="Number of worker processes. Two or more workers run on Ray.")
    address: str | None = Field(
        default=None,
        description="Address of a Ray cluster, HOST:PORT. Every node must see the run folder. None starts a local Ray.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device to train on. auto uses cuda if a CUDA device is available."
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads per worker. None uses PyTorch's default.")
    checkpoint_every: int = Field(default=200, ge=1, description="Number of steps between checkpoints.")
    log_every: int = Field(default=10, ge=1, description="Number of steps between log lines.")
    compile: bool = Field(default=False, description="Use torch.compile.")
    evaluate_every: int | None = Field(
        default=None,
        ge=0,
        description="Number of steps between evaluations on the dev captions. None: evaluate after every epoch. "
        "0: never evaluate.",
    )
    keep_best: int = Field(
        default=0,
        ge=0,
        description="Number of checkpoints with the highest dev recall to keep. The last two checkpoints are kept too.",
    )
    keep_all: bool = Field(default=False, description="Keep all checkpoints, including those of evaluations.")
    export: bool = Field(default=False, description="Write a bundle from the last checkpoint without further training.")
    step: int | None = Field(
        default=None,
        ge=1,
        description="Step of the checkpoint to export, with run.export. None exports the last checkpoint.",
    )

    @property
    def folder(self) -> Path:
        """The run folder as an absolute path."""
        return (self.dir or self.out.with_name(f"{self.out.name}.run")).absolute()

    @property
    def distributed(self) -> bool:
        """True if the training run uses Ray."""
        return self.workers > 1 or self.address is not None


class TrainRequest(Settings):
    """A request to train a model bundle."""

    inputs: TrainingInputs
    run: RunSettings


def check_request(request: TrainRequest, config: TrainConfig) -> None:
    """Raise UsageError if settings conflict or are missing. The message has one line per problem."""
    inputs, objective, fitting, loop = request.inputs, config.objective, config.fitting, config.loop
    no_loss = inputs.teacher is None and not objective.itm_weight + objective.mlm_weight + objective.recovery_weight
    problems = {
        "set exactly one of inputs.model and inputs.vision, which give the frozen towers": (
            (inputs.model is None) == (inputs.vision is None)
        ),
        "the number of steps is missing; set loop.steps or loop.epochs": loop.steps is None and loop.epochs is None,
        f"loop.batch_size is {loop.batch_size} and run.workers is {request.run.workers}; the batch size must be a "
        "multiple of the number of workers": loop.batch_size % request.run.workers != 0,
        "there is nothing to train: all losses have weight 0; raise a weight or set inputs.teacher": no_loss,
        "fitting.pooled_dim has no effect without a weight; set inputs.dev or fitting.pooled_weight": (
            fitting.pooled_dim > 0 and inputs.dev is None and not fitting.pooled_weight
        ),
        "fitting.hubness_bank needs inputs.dev: the weight of the hubness correction is fitted to dev captions": (
            fitting.hubness_bank > 0 and inputs.dev is None
        ),
        "run.keep_best needs inputs.dev: checkpoints are compared by recall on dev captions": (
            request.run.keep_best > 0 and inputs.dev is None
        ),
        "inputs.features is online, but clips have stored features only; leave inputs.features out": (
            inputs.features == ONLINE and config.architecture.frames is not None
        ),
        f"inputs.feature_precision is {inputs.feature_precision}, but inputs.features is set, so the run stores no "
        "features; leave inputs.feature_precision out": inputs.feature_precision != "bf16"
        and inputs.features is not None,
        "run.step needs run.export": request.run.step is not None and not request.run.export,
        "inputs.features is online, so inputs.view_features has no effect; leave it out": (
            inputs.features == ONLINE and inputs.view_features is not None
        ),
        "inputs.view_features needs augmentation.views, the number of views per photo": (
            inputs.view_features is not None and not config.augmentation.views
        ),
    }
    if lines := [line for line, is_problem in problems.items() if is_problem]:
        raise UsageError("\n".join(lines))
