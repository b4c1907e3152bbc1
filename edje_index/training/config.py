"""Training settings: one frozen pydantic model per group of settings.

The defaults are the hyperparameters of the EDJE paper.

A setting is named ``group.key`` everywhere: in Python, in settings files, on the command line and in error messages.
The module does not import torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from edje_index.models import MAX_FRAMES
from storage_formats.errors import UsageError

MAX_TEXT_LENGTH = 64  # maximum tokens per caption that the joint encoder reads
AdapterKind: TypeAlias = Literal[
    "compressed", "local", "strided", "clustered", "pruned", "frame-embeddings", "frame-tokens"
]
Model = TypeVar("Model", bound="Settings")


class Settings(BaseModel):
    """Base class of a group of settings. Unknown names and values of the wrong type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ArchitectureConfig(Settings):
    """Architecture of the model to train."""

    adapter: AdapterKind = Field(
        default="compressed",
        description="Kind of adapter. compressed: learned queries attend to the patches. local: one token per patch. "
        "strided, clustered, pruned: the patches are reduced without training. frame-embeddings, frame-tokens: for "
        "clips; learned queries attend to the embeddings of all frames, or to the tokens of all frames.",
    )
    frames: int | None = Field(
        default=None,
        ge=1,
        le=MAX_FRAMES,
        description="Frames per clip, only for a frame-embeddings or frame-tokens adapter.",
    )
    tokens: int = Field(
        default=64,
        ge=1,
        description="Stored tokens per image. A local adapter ignores this setting and stores one token per patch.",
    )
    adapter_hidden: int = Field(default=8192, ge=1, description="Width of the adapter's MLP.")
    language_layers: int | None = Field(
        default=None,
        ge=1,
        description="Number of language model layers to keep, counted from the input. None keeps all layers.",
    )
    canonical_captions: bool = Field(
        default=True,
        description="Convert captions to lower case without punctuation, in training and in search.",
    )
    word_embeddings: Literal["trained", "frozen"] = Field(
        default="trained",
        description="Train or freeze the word embeddings. A packed model does not store frozen word embeddings.",
    )
    dropout: float | None = Field(
        default=None, ge=0, lt=1, description="Dropout of hidden states. None keeps the value of the language model."
    )
    attention_dropout: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Dropout of attention weights; slow on a CPU. None keeps the value of the language model.",
    )


class AugmentationConfig(Settings):
    """Settings of random augmentation, which is drawn anew at every step."""

    views: int = Field(
        default=0,
        ge=0,
        description="Random crops per image, half of them mirrored. Each crop costs one pass of the vision tower.",
    )
    patch_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of patches removed at random before a compressed adapter reads the patches.",
    )
    step_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per image that the joint encoder reads in a training step. None reads all tokens.",
    )


class ObjectiveConfig(Settings):
    """Settings of the training loss, a weighted sum of losses.

    The matching loss is always computed. Other losses are computed only if their weight is not 0.
    """

    itm: Literal["softmax", "binary"] = Field(
        default="softmax",
        description="Matching loss. softmax: cross-entropy of each positive pair against its negatives. "
        "binary: binary cross-entropy of each pair.",
    )
    itm_weight: float = Field(default=1.0, ge=0, description="Weight of the matching loss.")
    mlm_weight: float = Field(default=1.0, ge=0, description="Weight of the masked language modelling loss.")
    mlm_probability: float = Field(default=0.5, ge=0, le=1, description="Fraction of caption tokens that are masked.")
    recovery_weight: float = Field(default=1.0, ge=0, description="Weight of the text-embedding recovery loss.")
    distillation_weight: float = Field(
        default=1.0, ge=0, description="Weight of the distillation loss, used only with a teacher."
    )
    text_length: int = Field(
        default=MAX_TEXT_LENGTH,
        ge=4,
        le=MAX_TEXT_LENGTH,
        description="Maximum tokens per caption in training, including [CLS] and both [SEP]. Search always uses 64.",
    )


class NegativesConfig(Settings):
    """Settings of hard-negative mining."""

    count: int = Field(default=3, ge=1, description="Negative images per caption, and negative captions per image.")
    selection: Literal["top", "softmax"] = Field(
        default="top",
        description="Choice of negatives. top: the most similar candidates. softmax: random draws with softmax "
        "probabilities.",
    )
    temperature: float | None = Field(
        default=None,
        ge=0,
        description="Softmax temperature, if selection is softmax. None uses the temperature of the mining model.",
    )
    curriculum_steps: int = Field(
        default=0,
        ge=0,
        description="Steps over which the share of mined negatives grows from 0 to 1. Other negatives are random.",
    )


class AlignmentConfig(Settings):
    """Settings of the alignment phase, which runs before the joint phase.

    The alignment phase trains the adapter, without the language model, to make tokens that match caption words.
    """

    steps: int = Field(default=0, ge=0, description="Number of alignment steps; 0 skips the alignment phase.")
    batch_size: int = Field(default=256, ge=2, description="Images per alignment step.")
    captions: int = Field(default=5, ge=1, description="Captions per image in an alignment step.")
    adapter_init: Literal["clusters", "kept"] = Field(
        default="clusters",
        description="Initial queries of a new compressed adapter. clusters: cluster centres of patch features. "
        "kept: random queries.",
    )
    lr: float = Field(default=1e-3, ge=0, description="Learning rate after warm-up.")


class OptimizerConfig(Settings):
    """Settings of the AdamW optimiser and of the learning-rate schedule."""

    lr: float = Field(default=3e-4, ge=0, description="Learning rate after warm-up.")
    adapter_lr_factor: float = Field(
        default=1.0, ge=0, description="Factor that multiplies lr for the adapter; 0 freezes the adapter."
    )
    weight_decay: float = Field(default=0.05, ge=0, description="Weight decay of AdamW.")
    decayed: Literal["all", "matrices"] = Field(
        default="all",
        description="Parameters with weight decay. matrices: no decay of biases, norms and other vectors.",
    )
    warmup_steps: int = Field(
        default=100,
        ge=0,
        description="Steps of linear warm-up. With decay=epoch, warm-up ends after the first epoch at the latest.",
    )
    warmup_lr: float = Field(default=1e-6, ge=0, description="Learning rate at the first step of the warm-up.")
    min_lr: float = Field(default=1e-6, ge=0, description="Lowest learning rate of the decay.")
    decay: Literal["epoch", "cosine"] = Field(
        default="epoch",
        description="Decay of the learning rate. epoch: multiply by decay_rate after every epoch. cosine: fall along a "
        "cosine to min_lr.",
    )
    decay_rate: float = Field(
        default=0.9, ge=0, description="Factor that multiplies the learning rate after every epoch, with decay=epoch."
    )
    clip_norm: float = Field(
        default=0.0,
        ge=0,
        description="Maximum norm of the gradient; larger gradients are scaled down. 0 means no limit.",
    )


class LoopConfig(Settings):
    """Settings of the training loop: length of the joint phase, batches, random seed and data type."""

    steps: int | None = Field(default=None, ge=1, description="Number of optimiser steps. Set either steps or epochs.")
    epochs: float | None = Field(default=None, gt=0, description="Number of epochs. Set either steps or epochs.")
    epoch_of: Literal["captions", "images"] = Field(
        default="captions",
        description="What an epoch visits once: every caption, or every image with one of its captions.",
    )
    batch_size: int = Field(default=64, ge=2, description="Pairs per forward pass, summed over all workers.")
    accumulate: int = Field(default=1, ge=1, description="Forward passes per optimiser step.")
    seed: int = Field(default=0, ge=0, description="Seed of all random numbers.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Data type of matrix products. auto is bfloat16 on CUDA and float32 on a CPU."
    )
    max_bad_steps: int = Field(
        default=10,
        ge=1,
        description="Number of consecutive steps without a finite gradient after which training fails.",
    )


class FittingConfig(Settings):
    """Settings of the final score. Weights that are None are fitted to the dev captions."""

    pooled_dim: int = Field(
        default=0, ge=0, description="Dimensions of the pooled similarity; 0 leaves out the pooled similarity."
    )
    hubness_bank: int = Field(
        default=0,
        ge=0,
        description="Number of captions, and of images, in the hubness bank; 0 leaves out the hubness correction.",
    )
    embedding_weight: float | None = Field(
        default=None, description="Weight of the embedding similarity. None fits the weight."
    )
    late_weight: float | None = Field(default=None, description="Weight of the late interaction. None fits the weight.")
    pooled_weight: float | None = Field(
        default=None, description="Weight of the pooled similarity. None fits the weight."
    )
    dev_captions: int = Field(
        default=500, ge=1, description="Maximum number of dev captions, and of dev images, used as queries."
    )
    dev_pool: int = Field(default=20, ge=2, description="Candidates re-ranked per dev query.")


class TrainConfig(Settings):
    """All settings of a training run that affect the trained weights."""

    architecture: ArchitectureConfig = ArchitectureConfig()
    augmentation: AugmentationConfig = AugmentationConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    negatives: NegativesConfig = NegativesConfig()
    alignment: AlignmentConfig = AlignmentConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loop: LoopConfig = LoopConfig()
    fitting: FittingConfig = FittingConfig()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if contradictions := _contradictions(self):
            raise ValueError("\n".join(contradictions))
        return self


def make_config(values: Mapping[str, Any]) -> TrainConfig:
    """Return the training settings in `values`, a nested dictionary ``{group: {key: value}}``.

    Missing settings get their default values.

    Raises:
        UsageError: a setting is unknown or has a wrong value, or two settings contradict each other. The message has
            one line per problem.

    Example:
        >>> make_config({"loop": {"steps": 1000}}).loop.steps
        1000
    """
    return validated(TrainConfig, values)


def validated(model: type[Model], values: Mapping[str, Any]) -> Model:
    """Validate `values`, a nested dictionary ``{group: {key: value}}``, and return them as an instance of `model`.

    Raises:
        UsageError: a setting is unknown or has a wrong value, or two settings contradict each other. The message has
            one line per problem.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UsageError("\n".join(_describe(model, problem) for problem in error.errors())) from None


def _describe(model: type[Settings], problem: Any) -> str:
    name, message, value = ".".join(map(str, problem["loc"])), str(problem["msg"]), problem["input"]
    if problem["type"] == "extra_forbidden":
        return f"no setting is named {name}" + _suggestion(model, name)
    if problem["type"] == "value_error":
        return message.removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{name} is missing"
    return f"{name} is {value!r}; {message[0].lower()}{message[1:]}"


def _suggestion(model: type[Settings], name: str) -> str:
    """Return "; did you mean ...?" with the names of similar settings. Return "" if there are none."""
    names = setting_names(model)
    same_key = [other for other in names if other.split(".")[-1] == name.split(".")[-1]]
    alike = difflib.get_close_matches(name, [*names, *model.model_fields], n=1)
    return f"; did you mean {' or '.join(same_key or alike)}?" if same_key or alike else ""


def setting_names(model: type[Settings]) -> list[str]:
    """Return the name ``group.key`` of every setting of every group in `model`."""
    return [f"{group}.{key}" for group, kind in groups(model).items() for key in kind.model_fields]


def groups(model: type[Settings]) -> dict[str, type[Settings]]:
    """Return the class of each group of settings in `model`, by field name."""
    annotations = {name: field.annotation for name, field in model.model_fields.items()}
    return {name: kind for name, kind in annotations.items() if isinstance(kind, type) and issubclass(kind, Settings)}


def _contradictions(config: TrainConfig) -> list[str]:
    lines = []
    if config.loop.steps is not None and config.loop.epochs is not None:
        lines.append(f"loop.steps is {config.loop.steps} and loop.epochs is {config.loop.epochs:g}; set one of them")
    if config.loop.batch_size <= config.negatives.count:
        lines.append(
            f"loop.batch_size is {config.loop.batch_size} and negatives.count is {config.negatives.count}; "
            "loop.batch_size must be larger"
        )
    if config.negatives.temperature is not None and config.negatives.selection == "top":
        lines.append(
            "negatives.temperature is set, but negatives.selection is 'top'; set negatives.selection to softmax"
        )
    if config.fitting.pooled_weight and not config.fitting.pooled_dim:
        lines.append("fitting.pooled_weight is set, but fitting.pooled_dim is 0; set both or neither")
    if config.augmentation.patch_dropout and config.architecture.adapter != "compressed":
        lines.append(
            "augmentation.patch_dropout needs a compressed adapter, but architecture.adapter is "
            f"{config.architecture.adapter!r}; set augmentation.patch_dropout to 0"
        )
    architecture = config.architecture
    is_temporal = architecture.adapter.startswith("frame-")
    if is_temporal != (architecture.frames is not None):
        lines.append(
            f"architecture.adapter is {architecture.adapter!r} and architecture.frames is {architecture.frames}; set "
            "architecture.frames for a frame-embeddings or frame-tokens adapter only"
        )
    if is_temporal and config.augmentation.views:
        lines.append("augmentation.views makes views of photos, not of clips; set augmentation.views to 0")
    return lines
