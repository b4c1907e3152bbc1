"""What training does: one tree of frozen values whose defaults are the paper's (appendix "Training Hyperparameters").

The name of a leaf is its name as a command-line option and in a TOML file, where the groups are tables. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any, get_type_hints

from storage_formats.errors import UsageError

PHASE_LR = {"pretrain": 3e-4, "finetune": 2e-5}
ADAPTERS = ("compressed", "local", "strided", "clustered", "pruned")


def _leaf(default: Any, text: str, *, choices: tuple[str, ...] | None = None, minimum: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices, "minimum": minimum})


@dataclass(frozen=True)
class ArchitectureConfig:
    """What is trained."""

    adapter: str = _leaf("compressed", "Kind of adapter.", choices=ADAPTERS)
    tokens: int = _leaf(64, "Tokens that are stored of an image; a local adapter stores all patches.", minimum=1)
    adapter_hidden: int = _leaf(8192, "Width of the adapter's MLP.", minimum=1)
    language_layers: int | None = _leaf(None, "Keep so many layers of the language model, the first ones.", minimum=1)
    words: str = _leaf(
        "trained",
        "Word vectors of the language model; frozen ones need not be carried beside it (carry-model).",
        choices=("trained", "frozen"),
    )
    dropout: float | None = _leaf(
        None, "Dropout of hidden states in training.  [default: the language model's]", minimum=0
    )
    attention_dropout: float | None = _leaf(
        None, "Dropout of attention in training; dear on a CPU.  [default: the language model's]", minimum=0
    )


@dataclass(frozen=True)
class SeenConfig:
    """What of an image a step sees, a random choice anew in every step: against overfitting."""

    views: int = _leaf(
        0,
        "Random crops of each photo that are trained on beside it, half of them mirrored; the features of each cost "
        "a pass of the tower.",
        minimum=0,
    )
    patch_dropout: float = _leaf(0.0, "Part of the patches that the compressed adapter does not see.", minimum=0)
    step_tokens: int | None = _leaf(
        None, "Of an image's tokens, how many the joint encoder reads in training.  [default: all]", minimum=1
    )


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised: the weighted sum of the losses in `losses`."""

    itm: str = _leaf(
        "softmax",
        "Matching loss: cross-entropy of the positive against its negatives, or binary for each pair.",
        choices=("softmax", "binary"),
    )
    itm_weight: float = _leaf(1.0, "Weight of the matching loss.", minimum=0)
    mlm_weight: float = _leaf(1.0, "Weight of masked language modelling; 0 leaves it out.", minimum=0)
    mlm_probability: float = _leaf(0.5, "Part of the caption tokens that are masked.", minimum=0)
    recovery_weight: float = _leaf(1.0, "Weight of text-embedding recovery; 0 leaves it out.", minimum=0)
    distillation_weight: float = _leaf(1.0, "Weight of distillation, with a teacher.", minimum=0)
    text_length: int = _leaf(
        64, "Longest text row in training, [CLS] and both [SEP] included, in tokens; 64 in search.", minimum=4
    )


@dataclass(frozen=True)
class NegativesConfig:
    """Which pairs are negatives; see `negatives`."""

    negatives: int = _leaf(3, "Negative images, and as many negative texts, of a pair.", minimum=1)
    negatives_temperature: float | None = _leaf(
        None, "Similarities are divided by it before the softmax; 0 takes the top-k.  [default: the tower's]", minimum=0
    )
    negatives_curriculum: int = _leaf(
        0, "Steps over which the part of mined negatives grows from none to all; the others are random.", minimum=0
    )


@dataclass(frozen=True)
class AlignmentConfig:
    """A cheap phase before training proper, without the language model: see `losses.alignment_loss`."""

    align_steps: int = _leaf(0, "Steps that first align the adapter's tokens with caption words.", minimum=0)
    align_batch_size: int = _leaf(256, "Images of an alignment step.", minimum=2)
    align_captions: int = _leaf(5, "Captions of each image in an alignment step.", minimum=1)
    align_start: str = _leaf(
        "clusters",
        "Initialisation of a new compressed adapter: queries at clusters of patches, or unchanged.",
        choices=("clusters", "kept"),
    )
    align_lr: float = _leaf(1e-3, "Learning rate of the alignment.", minimum=0)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate over time; see `schedule`."""

    lr: float | None = _leaf(None, "Learning rate.  [default: 3e-4 for pretrain, 2e-5 for finetune]", minimum=0)
    adapter_lr_factor: float = _leaf(1.0, "The adapter's learning rate over the language model's.", minimum=0)
    weight_decay: float = _leaf(0.05, "Weight decay, not of biases and norms.", minimum=0)
    warmup_steps: int = _leaf(100, "Steps of linear warm-up.", minimum=0)
    warmup_lr: float = _leaf(1e-6, "Learning rate that the warm-up begins with.", minimum=0)
    min_lr: float = _leaf(1e-6, "Learning rate that the decay ends with.", minimum=0)
    decay: str = _leaf(
        "epoch", "After each epoch by --decay-rate, or along a cosine to the last step.", choices=("epoch", "cosine")
    )
    decay_rate: float = _leaf(0.9, "Factor of the learning rate after each epoch.", minimum=0)
    clip_norm: float = _leaf(1.0, "Gradients are scaled down to this norm.", minimum=0)


@dataclass(frozen=True)
class LoopConfig:
    """How long, on how much at a time."""

    phase: str = _leaf("pretrain", "Decides the default learning rate.", choices=tuple(PHASE_LR))
    steps: int | None = _leaf(None, "Optimiser steps (or give --epochs).", minimum=1)
    epochs: float | None = _leaf(None, "Passes over the images, each with one of its captions.", minimum=0)
    batch_size: int = _leaf(64, "Pairs of a forward pass, all workers together.", minimum=2)
    accumulate: int = _leaf(1, "Forward passes of an optimiser step.", minimum=1)
    seed: int = _leaf(0, "Decides everything random.", minimum=0)
    dtype: str = _leaf(
        "auto",
        "Type of matrix products; auto is bfloat16 on cuda, float32 on cpu.",
        choices=("auto", "float32", "bfloat16"),
    )
    max_bad_steps: int = _leaf(10, "Steps in a row without a finite gradient that end the training.", minimum=1)


@dataclass(frozen=True)
class SelectionConfig:
    """What the final score adds to the logit, with weights fitted to --dev; see `selection`, `pooled` and `bank`."""

    pooled_dim: int = _leaf(
        0, "Fit a pooled similarity of so many dimensions when all steps are done; 0 leaves it out.", minimum=0
    )
    bank: int = _leaf(
        0,
        "Keep a bank of so many captions and images that were trained on, and take off a score what its candidate gets "
        "from them in general; 0 leaves it out.",
        minimum=0,
    )
    embedding_weight: float | None = _leaf(
        None, "Weight of the embedding similarity in the final score.  [default: the best on --dev, else 0]"
    )
    late_weight: float | None = _leaf(
        None, "Weight of the late interaction of words and image tokens.  [default: the best on --dev, else 0]"
    )
    pooled_weight: float | None = _leaf(
        None, "Weight of the pooled similarity, with --pooled-dim.  [default: the best on --dev, else 0]"
    )
    dev_captions: int = _leaf(500, "Captions of --dev to choose by, at most, and as many images.", minimum=1)
    dev_pool: int = _leaf(20, "Nearest images, or captions, that are re-ranked to choose.", minimum=2)


@dataclass(frozen=True)
class TrainConfig:
    """All that decides the trained weights but for the data and the weights to start from."""

    architecture: ArchitectureConfig = field(default_factory=ArchitectureConfig)
    seen: SeenConfig = field(default_factory=SeenConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)

    @property
    def lr(self) -> float:
        """Learning rate after the warm-up."""
        return PHASE_LR[self.loop.phase] if self.optimizer.lr is None else self.optimizer.lr

    def flat(self) -> dict[str, Any]:
        """Every leaf by its name."""
        return {name: value for group in asdict(self).values() for name, value in group.items()}


def leaves() -> dict[str, tuple[str, Field[Any], Any]]:
    """Name of every leaf: its group, its dataclass field and its type."""
    found = {}
    for group in fields(TrainConfig):
        cls: Any = group.default_factory
        types = get_type_hints(cls)
        found.update({leaf.name: (group.name, leaf, types[leaf.name]) for leaf in fields(cls)})
    return found


def make_config(values: Mapping[str, Any]) -> TrainConfig:
    """The tree with the leaves named in `values` replaced.

    Raises:
        UsageError: an unknown name, or a value of the wrong type or out of its range.
    """
    known = leaves()
    config = TrainConfig()
    for name, value in values.items():
        if name not in known:
            raise UsageError(f"unknown setting '{name}'; known are {', '.join(known)}")
        group, leaf, kind = known[name]
        part = replace(getattr(config, group), **{name: _checked(name, value, leaf, kind)})
        config = replace(config, **{group: part})
    _check(config)
    return config


def _checked(name: str, value: Any, leaf: Field[Any], kind: Any) -> Any:
    optional = type(None) in getattr(kind, "__args__", ())
    plain = next((t for t in getattr(kind, "__args__", ()) if t is not type(None)), kind)
    if value is None and optional:
        return None
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, plain) or isinstance(value, bool) or (plain is float and not math.isfinite(value)):
        raise UsageError(f"'{name}' takes a value of type {plain.__name__}, got {value!r}")
    choices, minimum = leaf.metadata["choices"], leaf.metadata["minimum"]
    if choices is not None and value not in choices:
        raise UsageError(f"'{name}' is one of {', '.join(choices)}, got {value!r}")
    if minimum is not None and value < minimum:
        raise UsageError(f"'{name}' must be at least {minimum}, got {value}")
    return value


def _check(config: TrainConfig) -> None:
    """UsageError where leaves contradict each other."""
    loop, objective = config.loop, config.objective
    if loop.steps is not None and loop.epochs is not None:
        raise UsageError("give --steps or --epochs, not both")
    if loop.batch_size <= config.negatives.negatives:
        raise UsageError(
            f"{config.negatives.negatives} negatives need a batch of more than as many pairs, not {loop.batch_size}; "
            "raise --batch-size or lower --negatives"
        )
    if config.selection.pooled_weight and not config.selection.pooled_dim:
        raise UsageError("--pooled-weight is of a pooled similarity, which --pooled-dim fits; give both")
    if objective.text_length > 64:
        raise UsageError(f"--text-length is at most 64, all that a joint encoder reads, got {objective.text_length}")
    architecture = config.architecture
    dropouts = (architecture.dropout, architecture.attention_dropout, config.seen.patch_dropout)
    if objective.mlm_probability > 1 or max(part or 0 for part in dropouts) >= 1:
        raise UsageError("--mlm-probability is at most 1, --dropout, --attention-dropout and --patch-dropout below 1")
    if config.seen.patch_dropout and architecture.adapter != "compressed":
        raise UsageError(f"--patch-dropout is for a compressed adapter, not a {architecture.adapter} one")
