"""The embedding model that mines hard negatives: the frozen towers, or another bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.training.index_builder import check_encoder, image_sources
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.data.dataset import Miner
    from pipelines.jobs.training.index_builder import IndexBuilder
    from pipelines.jobs.training.matching import MatchedCaptions
    from pipelines.jobs.training.request import TrainingInputs
    from pipelines.jobs.training.start import StartModel


@dataclass(frozen=True)
class OpenMiner:
    """A mining model.

    Attributes:
        miner: its text tower and the embeddings of the images.
        temperature: temperature of the softmax over its similarities.
    """

    miner: Miner
    temperature: float


def open_miner(
    inputs: TrainingInputs, start: StartModel, features: Path, matched: MatchedCaptions, builder: IndexBuilder
) -> OpenMiner:
    """The frozen towers with the index `features`, or `inputs.miner` with an index that is given or built.

    Raises:
        UsageError: the given index lacks images, or another model built it.
    """
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.captions.matching import match_rows
    from edje_index.training.data.dataset import Miner
    from edje_index.training.model.start_bundle import logit_scale

    if inputs.miner is None:
        miner = Miner(start.bundle.text, features, matched.captions.rows)
        return OpenMiner(miner, 1 / logit_scale(start.bundle))
    bundle = ModelBundle.load(inputs.miner)
    if inputs.miner_features is None:
        sources = image_sources(builder.folder / "miner.edje.jsonl", matched.items)
        index = builder.build("miner.edje", inputs.miner, sources, "computing embeddings of the mining model, once")
    else:
        index = inputs.miner_features.absolute()
        check_encoder(index, [bundle.encoder_fingerprint], "embeddings of the mining model")
    rows = match_rows(index, matched.items)
    if missing := int((rows < 0).sum()):
        raise UsageError(f"{index} lacks {missing:,} of the training images; build it from all of them")
    return OpenMiner(Miner(bundle.text, index, rows), 1 / logit_scale(bundle))
