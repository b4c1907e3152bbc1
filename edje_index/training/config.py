"""Training settings: one frozen pydantic model per group of settings, and the presets.

The defaults are the hyperparameters of the EDJE paper.

A setting is named ``group.key`` everywhere: in Python, in settings files, on the
command line and in error messages. This module does not import torch, so that the
command line can read and list settings quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from storage_formats.arguments import did_you_mean, shown
from storage_formats.errors import UsageError

SettingPath = Annotated[Path, Field(strict=False), AfterValidator(Path.absolute)]
IndexPath = Annotated[
    str,
    BeforeValidator(lambda given: str(given) if isinstance(given, Path) else given),
    "Path or URL of an index",
]
# A column of numbers may name the splits.
SplitName = Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
AtLeastTwo = Annotated[int, Field(ge=2)]
Values = dict[str, dict[str, Any]]


class Settings(BaseModel):
    """Base class of a group of settings. Unknown names and values of the wrong type
    are errors.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ArchitectureConfig(Settings):
    """Architecture of the model to train."""

    adapter: Literal["compressed", "local", "strided", "clustered", "pruned"] = (
        "compressed"
    )
    """Kind of adapter. compressed: learned queries attend to the patches. local: one
    token per patch. strided, clustered, pruned: a method without trained weights
    reduces the patches.
    """
    tokens: PositiveInt = 64
    """Stored tokens per image. A local adapter ignores this setting and stores one
    token per patch.
    """
    adapter_hidden: PositiveInt = 8192
    """Hidden width of the adapter's MLP."""
    language_layers: PositiveInt | None = None
    """Number of language model layers to keep, counted from the input. None keeps
    all layers.
    """
    canonical_captions: bool = True
    """Convert captions to lower case without punctuation, in training and in search."""
    word_embeddings: Literal["trained", "frozen"] = "trained"
    """Whether the word embeddings are trained. A packed model is smaller with frozen
    word embeddings, because it does not store them.
    """
    dropout: Fraction | None = None
    """Dropout of hidden states and attention weights. None keeps the values of the
    language model.
    """


class ObjectiveConfig(Settings):
    """Settings of the training loss, a weighted sum of losses.

    The matching loss has weight 1. With a teacher, the distillation loss is added with
    weight 1.
    """

    mlm_weight: NonNegativeFloat = 1.0
    """Weight of the masked language modelling loss; 0 leaves out this loss."""
    mlm_probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability with which a caption token is masked."""
    recovery_weight: NonNegativeFloat = 1.0
    """Weight of the text-embedding recovery loss; 0 leaves out this loss."""


class NegativesConfig(Settings):
    """Settings of hard-negative mining, which selects the most similar candidates
    of a batch.
    """

    count: PositiveInt = 3
    """Negative images per caption, and negative captions per image."""


class AlignmentConfig(Settings):
    """Settings of the alignment phase, which runs before the joint phase.

    The alignment phase trains the adapter to make tokens that are similar to the word
    embeddings of the captions. It does not use the layers of the language model.
    """

    steps: NonNegativeInt = 0
    """Number of alignment steps; 0 skips the alignment phase."""
    batch_size: AtLeastTwo = 256
    """Images per alignment step."""
    captions: PositiveInt = 5
    """Captions per image in an alignment step."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate after warm-up."""


class OptimizerConfig(Settings):
    """Settings of the AdamW optimiser and of the learning-rate schedule."""

    lr: NonNegativeFloat = 3e-4
    """Learning rate after warm-up."""
    adapter_lr_factor: NonNegativeFloat = 1.0
    """Factor that multiplies lr for the adapter; 0 freezes the adapter."""
    weight_decay: NonNegativeFloat = 0.05
    """Weight decay of AdamW."""
    continued: bool = False
    """Continue the training run that made inputs.init, with its optimiser state, its
    number of epochs and no new warm-up. Its run folder must be INIT.run.
    """
    warmup_steps: NonNegativeInt = 100
    """Steps of linear warm-up. With decay=epoch, warm-up ends after the first epoch
    at the latest.
    """
    warmup_lr: NonNegativeFloat = 1e-6
    """Learning rate at the first step of the warm-up."""
    min_lr: NonNegativeFloat = 1e-6
    """Lowest learning rate that the decay reaches."""
    decay: Literal["epoch", "cosine"] = "epoch"
    """Decay of the learning rate. epoch: multiply by decay_rate after every epoch.
    cosine: fall along a cosine to min_lr.
    """
    decay_rate: NonNegativeFloat = 0.9
    """Factor that multiplies the learning rate after every epoch, with decay=epoch."""
    clip_norm: NonNegativeFloat = 0.0
    """Maximum norm of the gradient; larger gradients are scaled down. 0 means no
    limit.
    """


class LoopConfig(Settings):
    """Settings of the training loop: length of the joint phase, batches, random
    seed and data type.
    """

    steps: PositiveInt | None = None
    """Number of optimiser steps. Set either steps or epochs."""
    epochs: PositiveFloat | None = None
    """Number of epochs. Set either steps or epochs."""
    batch_size: AtLeastTwo = 64
    """Pairs per optimiser step, summed over all workers."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of all random numbers."""
    step_tokens: PositiveInt | None = None
    """Augmentation: number of random tokens per image that the joint encoder reads in a
    training step. None reads all tokens.
    """
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of matrix products. auto is bfloat16 on CUDA and float32 on a CPU."""


class FittingConfig(Settings):
    """Settings of the final score, whose weights are fitted to the dev captions."""

    pooled_dim: NonNegativeInt = 0
    """Width of the vectors of the pooled similarity. 0 fits no pooled similarity, and
    keeps that of inputs.init.
    """
    dev_captions: PositiveInt = 500
    """Maximum number of dev captions, and of dev images, used as queries."""
    dev_pool: AtLeastTwo = 20
    """Candidates re-ranked per dev query."""


class TrainingInputs(Settings):
    """The data set and the models that a training run reads."""

    index: IndexPath
    """Index of the images to train on, with their captions. Its tokens are patch
    features.
    """
    split: SplitName | None = None
    """Split of the index to train on. None takes all splits."""
    dev: IndexPath | None = None
    """Index of other images, built with the same bundle. The weights of the final score
    are fitted to their captions. It may be the same index with another split.
    """
    dev_split: SplitName | None = None
    """Split of the dev index to use. None takes all splits."""
    model: SettingPath | None = None
    """Bundle that built the index, with the frozen towers. None uses the path that is
    recorded in the index.
    """
    language: SettingPath | None = None
    """Initial language model: directory of a Hugging Face BERT model."""
    init: SettingPath | None = None
    """Bundle with the initial joint encoder. The adapter of this bundle is used too if
    its kind and sizes equal those of the settings.
    """
    teacher: SettingPath | None = None
    """Bundle of the teacher model, for distillation."""
    teacher_features: IndexPath | None = None
    """Index of the same images that the teacher built. With None, the teacher's adapter
    makes the tokens from the features of the student.
    """
    miner: IndexPath | None = None
    """Index of the same images. The model that built it mines hard negatives. None uses
    the frozen towers.
    """


class RunSettings(Settings):
    """Settings of output, hardware and checkpoints. Except `workers`, they change the
    trained weights only by rounding errors.
    """

    out: SettingPath
    """Directory of the bundle to write."""
    dir: SettingPath | None = None
    """Run folder for checkpoints and the log. None uses OUT.run."""
    workers: PositiveInt = 1
    """Number of worker processes. Two or more workers run on Ray. Each worker draws its
    own random numbers, so the number is part of the fingerprint of the run, and a run
    resumes only with the same number.
    """
    address: str | None = None
    """Address of a Ray cluster, HOST:PORT. Every node must see the run folder. None
    starts a local Ray.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto uses cuda if a CUDA device is available."""
    threads: PositiveInt | None = None
    """CPU threads per worker. None uses PyTorch's default for one worker, and one
    thread for several workers.
    """
    chunk_pairs: PositiveInt = 64
    """Largest number of pairs in a forward and backward pass of the joint encoder. A
    worker divides its pairs of a step into several passes. Fewer pairs per pass need
    less memory.
    """
    checkpoint_every: PositiveInt = 200
    """Number of steps between checkpoints."""
    log_every: PositiveInt = 10
    """Number of steps between log lines. The first and the last step of a phase have a
    line too.
    """
    evaluate_every: PositiveInt | None = None
    """Number of steps between evaluations on the dev captions. None: evaluate after
    every epoch.
    """

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.dir or self.out.with_name(f"{self.out.name}.run")


class TrainSettings(Settings):
    """All settings of a training run."""

    architecture: ArchitectureConfig = ArchitectureConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    negatives: NegativesConfig = NegativesConfig()
    alignment: AlignmentConfig = AlignmentConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loop: LoopConfig = LoopConfig()
    fitting: FittingConfig = FittingConfig()
    inputs: TrainingInputs
    run: RunSettings

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        inputs = self.inputs
        loop = self.loop
        workers = self.run.workers
        count = self.negatives.count
        # Each key describes a contradiction in one line.
        problems = {
            f"loop.steps is {loop.steps} and loop.epochs is {loop.epochs}; set one of"
            " loop.steps and loop.epochs": bool(loop.steps) == bool(loop.epochs),
            f"loop.batch_size is {loop.batch_size} and negatives.count is {count};"
            " loop.batch_size must be larger": loop.batch_size <= count,
            f"loop.batch_size is {loop.batch_size} and run.workers is {workers};"
            " the batch size must be a multiple of the number of workers": (
                loop.batch_size % workers
            ),
            "fitting.pooled_dim needs inputs.dev: the weight of the pooled similarity"
            " is fitted to dev captions": self.fitting.pooled_dim and not inputs.dev,
            "optimizer.continued needs inputs.init: set optimizer.continued to false to"
            " start with a new optimiser state and a warm-up": (
                self.optimizer.continued and not inputs.init
            ),
        }
        if lines := [line for line, is_wrong in problems.items() if is_wrong]:
            raise ValueError("\n".join(lines))
        return self


GROUPS: dict[str, type[Settings]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in TrainSettings.model_fields.items()
}
"""The class of each group of settings, by name."""


def validated(values: Mapping[str, Any]) -> TrainSettings:
    """Validate `values`, a nested dictionary ``{group: {key: value}}``.

    Raises:
        UsageError: a setting is unknown or has a wrong value, or two settings
            contradict each other. The message has one line per problem.
    """
    try:
        return TrainSettings.model_validate(values)
    except ValidationError as error:
        raise UsageError("\n".join(map(_describe, error.errors()))) from None


def _describe(problem: Any) -> str:
    name = ".".join(map(str, problem["loc"]))
    message = str(problem["msg"])
    if problem["type"] == "extra_forbidden":
        names = [
            f"{group}.{key}"
            for group, kind in GROUPS.items()
            for key in kind.model_fields
        ]
        key = name.split(".")[-1]
        alike = [other for other in names if other.endswith(f".{key}")]
        hint = did_you_mean(name, [*names, *GROUPS])
        if alike:
            hint = f"; did you mean {' or '.join(alike)}?"
        return f"no setting is named {name}{hint}"
    if problem["type"] == "value_error":
        return message.removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{name} is missing"
    return f"{name} is {problem['input']!r}; {message[0].lower()}{message[1:]}"


def merge_settings(preset: str, *sources: Mapping[str, Mapping[str, Any]]) -> Values:
    """Merge the settings of `preset` and of `sources`, each ``{group: {key: value}}``.
    Later values win.

    If a source sets ``loop.steps`` or ``loop.epochs``, the values that earlier sources
    gave to both are dropped.
    """
    if preset not in PRESETS:
        raise UsageError(
            f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}"
        )
    merged: Values = {"inputs": {}, "run": {}, "loop": {}}
    for source in (PRESETS[preset], *sources):
        for group, values in source.items():
            if not isinstance(values, Mapping):
                raise UsageError(
                    f"{group} must be a mapping of settings, got {shown(values)}",
                    parameter=group,
                )
            if group == "loop" and {"steps", "epochs"} & values.keys():
                merged["loop"] |= {"steps": None, "epochs": None}
            merged.setdefault(group, {}).update(values)
    return merged


# Settings of a small model: almost those of the shipped model. The adapter is frozen
# after the alignment phase. The joint encoder is small, and is trained with the
# matching loss only.
_SMALL: Mapping[str, Mapping[str, Any]] = {
    "architecture": {
        "canonical_captions": False,
        "adapter_hidden": 1536,
        "language_layers": 4,
        "word_embeddings": "frozen",
        "dropout": 0.1,
    },
    "objective": {"mlm_weight": 0.0, "recovery_weight": 0.0},
    "negatives": {"count": 1},
    "optimizer": {
        "lr": 2e-4,
        "adapter_lr_factor": 0.0,
        "decay": "cosine",
        "warmup_steps": 40,
        "clip_norm": 1.0,
    },
}
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # This preset has the default values, which are those of the first phase of the EDJE
    # paper, and the length of the published run.
    "paper": {"loop": {"epochs": 45.0}},
    # This preset is the second phase of the EDJE paper. It starts from the bundle of
    # the first phase, and uses only the matching and distillation losses. As in the
    # published code, the optimiser state and the number of epochs continue from the
    # first phase.
    "paper-finetune": {
        "objective": {"mlm_weight": 0.0, "recovery_weight": 0.0},
        "optimizer": {"lr": 2e-5, "continued": True},
    },
    # This preset is for a few thousand images and a few hours on a CPU.
    "small-data": {
        **_SMALL,
        "alignment": {"steps": 800, "batch_size": 128},
        "loop": {"steps": 400, "batch_size": 32, "step_tokens": 48},
        "fitting": {"pooled_dim": 300, "dev_captions": 1000},
    },
    # This preset shows in minutes that a training runs. The learning rate is low, so
    # that a model that it starts from does not become much worse.
    "quick": {
        **_SMALL,
        "optimizer": {**_SMALL["optimizer"], "lr": 2e-5, "warmup_steps": 10},
        "loop": {"steps": 60, "batch_size": 16, "step_tokens": 48},
        "fitting": {"dev_captions": 50, "dev_pool": 10},
    },
}
