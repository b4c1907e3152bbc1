"""Which rows of the feature index hold the captioned images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.progress.events import OnEvent, StatusMessage
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.captions.reading import CaptionedImage
    from edje_index.training.data.dataset import CaptionSet
    from pipelines.jobs.training.captions import Captions
    from storage_formats.format.manifest import CommittedIndex


@dataclass(frozen=True)
class MatchedCaptions:
    """Captioned images that have features.

    Attributes:
        items: the images to train on.
        captions: their rows in the feature index and their captions.
        dev: the same for the dev captions; None without dev captions.
        left_out: number of images to train on without features, by reason, and of "blank-caption" captions.
    """

    items: Sequence[CaptionedImage]
    captions: CaptionSet
    dev: CaptionSet | None
    left_out: dict[str, int]


def match_captions(index: CommittedIndex, captions: Captions, on_event: OnEvent) -> MatchedCaptions:
    """The captions whose images have features in `index`. Images that could not be decoded are left out.

    Raises:
        UsageError: an image is not in the index at all.
    """
    from edje_index.captions.matching import NAME_COLUMNS, NOT_IN_INDEX, match_items
    from edje_index.training.data.dataset import CaptionSet
    from storage_formats.format.rows import read_all_rows

    table = read_all_rows(index, NAME_COLUMNS)
    matches = [match_items(index.root, table, items) for items in (captions.trained, captions.dev) if items]
    for matched, items in zip(matches, (captions.trained, captions.dev), strict=False):
        if absent := matched.missing().get(NOT_IN_INDEX):
            raise UsageError(
                f"{absent:,} of {len(items):,} captioned images are not in {index.root}; build it from all images, "
                "those of the dev captions included, or leave inputs.features out, and the features are computed"
            )
    left_out = matches[0].missing()
    if left_out:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in left_out.items())
        on_event(StatusMessage(f"left out, without features: {reasons}"))
    if captions.blank:
        on_event(StatusMessage(f"left out, blank captions: {captions.blank:,}"))
        left_out = {**left_out, "blank-caption": captions.blank}
    trained_items, trained_rows = matches[0].indexed(captions.trained)
    trained = CaptionSet(trained_rows, [item.captions for item in trained_items])
    dev = None
    if captions.dev:
        dev_items, dev_rows = matches[1].indexed(captions.dev)
        dev = CaptionSet(dev_rows, [item.captions for item in dev_items])
    return MatchedCaptions(trained_items, trained, dev, left_out)
