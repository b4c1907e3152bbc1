"""Which rows of the feature index hold the captioned images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.progress.events import OnEvent, StatusMessage
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.captions.reading import CaptionedImage
    from edje_index.training.data.dataset import CaptionSet
    from pipelines.jobs.training.captions import Captions


@dataclass(frozen=True)
class MatchedCaptions:
    """Captioned images that have features.

    Attributes:
        items: the images to train on.
        captions: their rows in the feature index and their captions.
        dev: the same for the dev captions; None without dev captions.
        left_out: number of images to train on without features, by reason.
    """

    items: Sequence[CaptionedImage]
    captions: CaptionSet
    dev: CaptionSet | None
    left_out: dict[str, int]


def match_captions(index: Path, captions: Captions, on_event: OnEvent) -> MatchedCaptions:
    """The captions whose images have features in `index`. Images that could not be decoded are left out.

    Raises:
        UsageError: an image is not in the index at all.
    """
    items, trained, left_out = _with_features(index, captions.trained)
    dev = _with_features(index, captions.dev)[1] if captions.dev else None
    if left_out:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in left_out.items())
        on_event(StatusMessage(f"left out, without features: {reasons}"))
    return MatchedCaptions(items, trained, dev, left_out)


def _with_features(
    index: Path, items: Sequence[CaptionedImage]
) -> tuple[Sequence[CaptionedImage], CaptionSet, dict[str, int]]:
    """The items with features, their captions and rows, and the number of the others by reason."""
    from edje_index.captions.matching import NOT_IN_INDEX, match_items
    from edje_index.training.data.dataset import CaptionSet

    matched = match_items(index, items)
    left_out = matched.missing()
    if absent := left_out.get(NOT_IN_INDEX):
        raise UsageError(
            f"{absent:,} of {len(items):,} captioned images are not in {index}; build it from all images, those of the "
            "dev captions included, or leave inputs.features out, and the features are computed"
        )
    positions = [position for position, row in enumerate(matched.rows) if row >= 0]
    kept = [items[position] for position in positions]
    return kept, CaptionSet(matched.rows[positions], [item.captions for item in kept]), left_out
