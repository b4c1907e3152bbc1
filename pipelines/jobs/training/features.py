"""The index of the frozen tower's features: a given one, or one that is built in the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.training.index_builder import check_encoder, image_sources

if TYPE_CHECKING:
    from edje_index.captions.reading import CaptionedImage
    from edje_index.training.data.dataset import CaptionSet
    from pipelines.jobs.training.index_builder import IndexBuilder
    from pipelines.jobs.training.start import StartModel


@dataclass(frozen=True)
class MatchedCaptions:
    """Captioned images that have features.

    Attributes:
        items: the images.
        captions: their rows in the feature index and their captions.
        left_out: number of images without features, by reason.
    """

    items: Sequence[CaptionedImage]
    captions: CaptionSet
    left_out: dict[str, int]


def feature_index(
    given: Path | None, start: StartModel, items: Sequence[CaptionedImage], builder: IndexBuilder
) -> Path:
    """The feature index of `items`.

    Raises:
        UsageError: `given` was built by another tower.
        JobStopped: the build was stopped; finished shards are kept.
    """
    if given is not None:
        check_encoder(given, start.accepted_features(), start.feature_adapter.kind)
        return given.absolute()
    name = "features.edje"
    sources = image_sources(builder.folder / f"{name}.jsonl", items)
    model = feature_model(builder.folder, start)
    return builder.build(name, model, sources, "computing features of the frozen tower, once")


def feature_model(folder: Path, start: StartModel) -> Path:
    """The bundle in the run folder that computes features. It is made if it is missing."""
    from edje_index.models.adapter import build_adapter

    model = folder / "features-model"
    if not model.exists():
        adapter = build_adapter(start.feature_adapter)
        notes = "computes features to train on; it cannot re-rank"
        replace(start.bundle, adapter=adapter, notes=notes, info=None).save(model)
    return model


def match_captions(index: Path, items: Sequence[CaptionedImage]) -> MatchedCaptions:
    """The images of `items` that have features in `index`.

    Raises:
        UsageError: an image is not in the index at all. Images that failed to decode are only counted.
    """
    from edje_index.captions.matching import NOT_IN_INDEX, match_items
    from edje_index.training.data.dataset import CaptionSet
    from storage_formats.errors import UsageError

    matched = match_items(index, items)
    left_out = matched.missing()
    if absent := left_out.get(NOT_IN_INDEX):
        raise UsageError(
            f"{absent:,} of {len(items):,} captioned images are not in {index}; build it from all images, those of the "
            "dev captions included, or leave the index out to have it computed"
        )
    positions = [position for position, row in enumerate(matched.rows) if row >= 0]
    kept = [items[position] for position in positions]
    return MatchedCaptions(kept, CaptionSet(matched.rows[positions], [item.captions for item in kept]), left_out)
