"""Reading of caption files in tests."""

from __future__ import annotations

import warnings
from pathlib import Path

from edje_index.captions.reading import CaptionedImage, read_captions


def read_counted(
    path: Path, split: str | None = None
) -> tuple[list[CaptionedImage], int]:
    """Return the captioned images, and the number of captions that a warning says are
    left out.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        items = read_captions(path, split=split)
    counts = [str(each.message).rpartition(": ")[2] for each in caught]
    return items, sum(int(count.replace(",", "")) for count in counts)
