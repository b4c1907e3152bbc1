"""The embedding model that mines hard negatives: the frozen towers, or another bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.training.index_builder import check_encoder, image_sources
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.data.dataset import Miner
    from pipelines.jobs.training.features import MatchedCaptions
    from pipelines.jobs.training.index_builder import IndexBuilder
    from pipelines.jobs.training.start import StartModel


def tower_miner(start: StartModel, features: Path, matched: MatchedCaptions) -> tuple[Miner, float]:
    """The frozen towers as mining model, and the temperature of their similarities."""
    from edje_index.training.data.dataset import Miner
    from edje_index.training.model.start_bundle import logit_scale

    return Miner(start.bundle.text, features, matched.captions.rows), 1 / logit_scale(start.bundle)


def other_miner(
    model: Path, given: Path | None, matched: MatchedCaptions, builder: IndexBuilder
) -> tuple[Miner, float]:
    """The bundle `model` as mining model, and the temperature of its similarities.

    Args:
        given: index that it built; None builds one.

    Raises:
        UsageError: `given` lacks images, or another model built it.
    """
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.captions.matching import match_rows
    from edje_index.training.data.dataset import Miner
    from edje_index.training.model.start_bundle import logit_scale

    bundle = ModelBundle.load(model)
    if given is None:
        sources = image_sources(builder.folder / "miner.edje.jsonl", matched.items)
        index = builder.build("miner.edje", model, sources, "computing embeddings of the mining model, once")
    else:
        check_encoder(given, [bundle.encoder_fingerprint], "embeddings of the mining model")
        index = given.absolute()
    rows = match_rows(index, matched.items)
    if missing := int((rows < 0).sum()):
        raise UsageError(f"{index} lacks {missing:,} of the training images; build it from all of them")
    return Miner(bundle.text, index, rows), 1 / logit_scale(bundle)
