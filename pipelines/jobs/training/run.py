"""The function `train`, and the result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pipelines.progress.events import OnEvent, ShouldStop, ignore, never
from storage_formats.atomic import Json
from storage_formats.extras import name_missing_extra
from storage_formats.remote.urls import IndexLocation


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        bundle: path of the trained bundle.
        fingerprint: fingerprint of the bundle.
        run: fingerprint of the settings and data of the training run.
        images, captions: numbers of training images and training captions.
        left_out: number of rows of the index that were not used, by reason. The reason
            is that of a failed row, "duplicate" or "no-caption".
        steps: number of finished steps of the phase that trains the joint encoder.
        seconds: wall time of this run.
        last: last record of the training log; empty if there is none.
        score: weights of the final score by direction; see
            `edje_index.scoring.weights.DirectionWeights`.
        fitting: settings with which the weights of the final score were fitted.
        dev: fitted weights and recalls on the dev captions by direction, "t2i" or
            "i2t"; see `edje_index.training.fit_weights`. None without dev captions.
        already_finished: True if an earlier call had finished the training run. This
            call then did nothing.

    Examples:
        >>> from edje_index import TrainResult
        >>> result = TrainResult(
        ...     "model",
        ...     "f" * 64,
        ...     "e" * 64,
        ...     images=6,
        ...     captions=6,
        ...     left_out={},
        ...     steps=2,
        ...     seconds=1.5,
        ... )
        >>> result.steps
        2
    """

    bundle: str
    fingerprint: str
    run: str
    images: int
    captions: int
    left_out: dict[str, int]
    steps: int
    seconds: float
    last: Json = field(default_factory=dict)
    score: Json = field(default_factory=dict)
    fitting: Json = field(default_factory=dict)
    dev: Json | None = None
    already_finished: bool = False


@name_missing_extra("train")
def train(
    index: IndexLocation,
    out: str | Path,
    *,
    preset: str = "paper",
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
    **settings: Json,
) -> TrainResult:
    """Train an adapter and a joint encoder on the captioned images of an index, as
    `edje-index train` does.

    Call the function again with the same arguments to resume a stopped training run.

    Args:
        index: index of the images, with their captions. It stores patch features: a
            bundle of `write_feature_bundle` built it.
        out: directory of the bundle to write.
        preset: name of the preset to start from, a key of
            `edje_index.training.config.PRESETS`.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.
        settings: settings that override the preset. Each keyword names a group of
            settings, such as `loop`. Each value maps setting names to setting values.
            `edje-index train --show-settings` lists all groups and names.

    Raises:
        UsageError: the preset or a setting is invalid.
        ModelError: a model cannot be used.
        JobStopped: the training run stopped early. The last checkpoint is kept.
        MissingExtraError: a package of the extra `train` is not installed.

    Examples:
        >>> from edje_index import train
        >>> result = train(
        ...     "features.edje",
        ...     "trained",
        ...     architecture={"tokens": 4, "adapter_hidden": 48},
        ...     loop={"steps": 2, "batch_size": 4},
        ... )
        >>> result.images, result.steps
        (6, 2)
    """
    from edje_index.training.config import merge_settings, validated
    from pipelines.jobs.training.job import run_training

    values = merge_settings(
        preset, settings, {"inputs": {"index": index}, "run": {"out": out}}
    )
    return run_training(validated(values), on_event, should_stop)
