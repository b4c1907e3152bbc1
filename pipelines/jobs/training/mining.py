"""The embedding model that mines hard negatives: the frozen towers, or another bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.training.index_builder import check_encoder, image_sources

if TYPE_CHECKING:
    from edje_index.training.config import NegativesConfig
    from edje_index.training.data.dataset import Miner
    from pipelines.jobs.training.index_builder import IndexBuilder
    from pipelines.jobs.training.matching import MatchedCaptions
    from pipelines.jobs.training.start import StartModel
    from storage_formats.format.manifest import CommittedIndex


@dataclass(frozen=True)
class OpenMiner:
    """A mining model.

    Attributes:
        miner: its text tower and the embeddings of the images.
        temperature: temperature of the softmax over its similarities.
    """

    miner: Miner
    temperature: float

    def temperature_for(self, settings: NegativesConfig) -> float:
        """Temperature of the draws; 0 takes the most similar."""
        if settings.selection == "top":
            return 0.0
        return self.temperature if settings.temperature is None else settings.temperature


def open_miner(
    path: Path | None, index: CommittedIndex | None, start: StartModel, matched: MatchedCaptions, builder: IndexBuilder
) -> OpenMiner:
    """The bundle at `path`, or the frozen towers of `start`.

    Args:
        path: a bundle; None takes the frozen towers.
        index: an index that the mining model built; None builds one from the images of `matched`. For the frozen towers
            the feature index.
        start: the bundle of the first step.
        matched: the images to train on.
        builder: builds the index.

    Raises:
        UsageError: `index` lacks images, or another model built it.
        JobStopped: the build was stopped; finished shards are kept.
    """
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.captions.matching import NAME_COLUMNS, match_all
    from edje_index.training.data.dataset import Miner
    from storage_formats.format.rows import read_all_rows
    from storage_formats.reading.embeddings import read_embeddings

    bundle, rows = start.bundle, matched.captions.rows
    if path is not None:
        bundle = ModelBundle.load(path)
        if index is None:
            sources = image_sources(builder.folder / "miner.edje.jsonl", matched.items)
            index = builder.build("miner.edje", path, sources, "computing embeddings of the mining model, once")
        else:
            check_encoder(index, [bundle.encoder_fingerprint], "embeddings of the mining model")
        rows = match_all(index.root, read_all_rows(index, NAME_COLUMNS), matched.items)
    assert index is not None
    embeddings = read_embeddings(index.root, index.manifest.spec, rows)
    logit_scale = float(bundle.clip.get_parameter("logit_scale").exp())
    return OpenMiner(Miner(bundle.text, embeddings), 1 / logit_scale)
