"""Prepares the token ids and embeddings of the captions, once for each run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edje_index.progress import OnProgress
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.config import NegativesConfig
    from edje_index.training.data.dataset import DevCaptions
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
    folder: Path,
    start: StartModel,
    matched: MatchedCaptions,
    mining: MiningModel,
    settings: NegativesConfig,
    on_progress: OnProgress,
) -> PreparedData:
    """Prepare the `TrainingData` of the captions in `folder`. An existing folder is reused.

    Args:
        folder: directory of the `TrainingData`.
        start: the initial model. Its tokenizer and text tower process the captions.
        matched: captions of images that have features.
        mining: the model that mines hard negatives.
        settings: settings of hard-negative mining.
        on_progress: called with the name of the activity, the number of finished items and the number of all items.

    Raises:
        UsageError: `folder` contains data of another number of images.
    """
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.training.data.dataset import DevCaptions, TrainingData
    from edje_index.training.data.preparation import CaptionModels, Miner, prepare_data
    from storage_formats.reading.embeddings import read_embeddings

    features, dev = matched.features, None
    if matched.dev is not None:
        dev = DevCaptions(matched.dev, read_embeddings(features, matched.dev.rows))
    bundle = start.bundle if mining.bundle is None else ModelBundle.load(mining.bundle)
    if not folder.exists():
        miner = Miner(bundle.text, mining.index, mining.rows)
        models = CaptionModels(start.bundle.joint.tokenizer, start.bundle.text, miner)
        prepare_data(folder, matched.captions, models, on_progress)
    if TrainingData.open(folder).images != len(matched.items):
        raise UsageError(f"{folder} contains the training data of other captions; set run.dir to another folder")
    temperature = 0.0 if settings.selection == "top" else settings.temperature
    if temperature is None:
        temperature = 1 / float(bundle.clip.get_parameter("logit_scale").exp())
    return PreparedData(folder, temperature, dev)
