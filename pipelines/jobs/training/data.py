"""Prepares the token ids and embeddings of the captions, once for each run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipelines.jobs.training.caption_shards import CaptionJob, prepare_captions
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.config import NegativesConfig
    from edje_index.training.data.dataset import DevCaptions
    from pipelines.jobs.training.indexes import IndexBuilder
    from pipelines.jobs.training.matching import MatchedCaptions, MiningModel
    from pipelines.jobs.training.start import StartModel


@dataclass(frozen=True)
class PreparedData:
    """The data that a training run reads in addition to features.

    Attributes:
        folder: directory of the stored `TrainingData`.
        temperature: temperature of the softmax from which hard negatives are drawn.
        dev: dev captions and embeddings of the dev images; None if there are no dev captions.
    """

    folder: Path
    temperature: float
    dev: DevCaptions | None


def prepared_data(
    start: StartModel,
    matched: MatchedCaptions,
    mining: MiningModel,
    settings: NegativesConfig,
    builder: IndexBuilder,
) -> PreparedData:
    """Prepare the `TrainingData` of the captions in the run folder. Existing data are reused.

    Args:
        start: the initial model. Its tokenizer and text tower process the captions.
        matched: captions of images that have features.
        mining: the model that mines hard negatives.
        settings: settings of hard-negative mining.
        builder: the run folder and the hardware settings.

    Raises:
        UsageError: the folder contains data of other images.
        JobStopped: the preparation stopped early. Finished shards are kept.
    """
    from edje_index.training.data.dataset import DevCaptions
    from storage_formats.reading.embeddings import read_embeddings

    temperature = _temperature(settings, start, mining)
    features, dev = matched.features, None
    if matched.dev is not None:
        dev = DevCaptions(matched.dev, read_embeddings(features, matched.dev.rows))
    job = CaptionJob(builder.folder / "data", matched.captions, start.path, mining)
    prepare_captions(job, builder.run, builder.on_event, builder.should_stop)
    check_images(job.folder, matched.captions.rows)
    return PreparedData(job.folder, temperature, dev)


def check_images(folder: Path, rows: NDArray[np.int64]) -> None:
    """Raise UsageError unless the `TrainingData` in `folder` are of the images at `rows` of the feature index."""
    from edje_index.training.data.dataset import TrainingData

    if not np.array_equal(TrainingData.open(folder).rows, rows):
        raise UsageError(
            f"{folder} contains the training data of other images: the features have changed, or another version of "
            "edje-index chose the images; set run.dir to another folder"
        )


def _temperature(settings: NegativesConfig, start: StartModel, mining: MiningModel) -> float:
    """Return the temperature of the softmax from which hard negatives are drawn. The default is the mining model's."""
    from edje_index.bundles.bundle import ModelBundle

    if settings.selection == "top":
        return 0.0
    if settings.temperature is not None:
        return settings.temperature
    bundle = start.bundle if mining.bundle is None else ModelBundle.load(mining.bundle)
    return 1 / float(bundle.clip.get_parameter("logit_scale").exp())
