"""Training from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.progress.events import ignore, never
from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    from pipelines.jobs.training.run import TrainResult
    from pipelines.progress.events import OnEvent, ShouldStop


@name_missing_extra("train")
def train(
    captions: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    preset: str = "paper",
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
    **settings: Mapping[str, Any],
) -> TrainResult:
    """Train an adapter and a joint encoder on captioned images, as `edje-index train` does.

    Call the function again with the same arguments to resume a stopped training run.

    Args:
        captions: one or several caption files; `edje_index.captions.reading.read_captions` lists the formats.
        out: directory of the bundle to write.
        preset: name of the preset to start from, a key of `edje_index.training.config.PRESETS`.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.
        settings: settings that override the preset. Each keyword names a group of settings, such as `loop`. Each value
            maps setting names to setting values. `edje-index train --show-settings` lists all groups and names.

    Raises:
        UsageError: the preset or a setting is invalid.
        ModelError: a model cannot be used.
        JobStopped: the training run stopped early. The last checkpoint is kept.
        MissingExtraError: a package of the extra `train` is not installed.

    Example:
        >>> from pipelines import train
        >>> result = train(
        ...     "captions.jsonl",
        ...     "trained",
        ...     inputs={"model": "model", "images": "photos"},
        ...     architecture={"tokens": 4, "adapter_hidden": 48},
        ...     loop={"steps": 2, "batch_size": 4},
        ... )
        >>> result.images, result.steps
        (6, 2)
    """
    from edje_index.training.config import TrainSettings, merge_settings, validated
    from pipelines.jobs.training.run import run_training

    files = [captions] if isinstance(captions, str | Path) else list(captions)
    values = merge_settings(preset, settings, {"inputs": {"captions": files}, "run": {"out": out}})
    return run_training(validated(TrainSettings, values), on_event, should_stop)
