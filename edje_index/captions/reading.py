"""Captions of images, read from files in common formats.

    *.jsonl, *.ndjson   one line per image: {"image": name, "captions": [...]}, or "caption": "..." for a single one,
                        and optionally "split" and "image_id"
    *.json              the same objects in one list; Karpathy split files (COCO, Flickr8k, Flickr30k: "images" with
                        "sentences"); COCO caption files ("images" and "annotations")
    *.parquet           columns of the same names
    *.tar               a WebDataset shard: KEY.jpg with KEY.txt (one caption per line) or KEY.json (the same object)

Records about the same image become one item. Blank captions are left out and counted.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from edje_index.captions.formats import read_records
from edje_index.captions.record import CaptionRecord
from storage_formats.errors import UsageError

# "restval" in Karpathy's COCO split: validation images that are used for training by convention.
_PARTS_OF_SPLIT = {"train": frozenset({"train", "restval"})}


@dataclass(frozen=True)
class CaptionedImage:
    """One image and its captions.

    Attributes:
        image: name of the image in the caption file.
        path: absolute path, or "<tar>!<member>".
        captions: at least one, none blank.
        split: split in the caption file; None if it names none.
        image_id: identifier in the caption file; `image` if it has none.
    """

    image: str
    path: Path
    captions: tuple[str, ...]
    split: str | None
    image_id: str


@dataclass(frozen=True)
class CaptionFile:
    """The content of a caption file, or of one split.

    Attributes:
        items: the captioned images, in file order.
        blank: number of blank captions, which were left out. An image without others has no item.
    """

    items: list[CaptionedImage]
    blank: int


def read_captions(path: str | Path, images: str | Path | None = None, split: str | None = None) -> list[CaptionedImage]:
    """The items of `read_caption_file`, with a warning if captions were left out."""
    content = read_caption_file(path, images, split)
    if content.blank:
        warnings.warn(f"{path}: blank captions are left out: {content.blank:,}", RuntimeWarning, stacklevel=2)
    return content.items


def read_caption_file(path: str | Path, images: str | Path | None = None, split: str | None = None) -> CaptionFile:
    """Read a caption file.

    Args:
        path: the file; its suffix names the format.
        images: base directory of relative image paths; default: the directory of `path`.
        split: read this split only; "train" includes Karpathy's "restval".

    Raises:
        UsageError: the file cannot be read, has a different form (the message names the first bad record), or has no
            captions of `split`.
    """
    file = Path(path)
    folder = Path(os.path.abspath(file.parent if images is None else images))
    if images is not None and not folder.is_dir():
        raise UsageError(f"there is no folder of images at {images}")
    parts = None if split is None else _PARTS_OF_SPLIT.get(split, frozenset({split}))
    kept, blank = [], 0
    for record in read_records(file):
        blank += record.blank if parts is None or record.split in parts else 0
        if record.captions:
            kept.append(_item(record, folder))
    items = _merged(kept)
    if not items:
        raise UsageError(f"{file} holds no captions" + (f" that are not blank; {blank:,} are" if blank else ""))
    return CaptionFile(items if parts is None else _of_split(items, parts, f"'{split}'", file), blank)


def _item(record: CaptionRecord, folder: Path) -> CaptionedImage:
    path = record.path or folder / record.image
    return CaptionedImage(
        image=record.image,
        path=Path(os.path.normpath(path)),
        captions=record.captions,
        split=record.split,
        image_id=record.image_id or record.image,
    )


def _merged(items: Iterable[CaptionedImage]) -> list[CaptionedImage]:
    """Merge the captions of items with the same image and split, at the position of the first."""
    merged: dict[tuple[Path, str | None], CaptionedImage] = {}
    for item in items:
        key = (item.path, item.split)
        first = merged.get(key)
        merged[key] = item if first is None else replace(first, captions=first.captions + item.captions)
    return list(merged.values())


def _of_split(items: list[CaptionedImage], parts: frozenset[str], split: str, file: Path) -> list[CaptionedImage]:
    kept = [item for item in items if item.split in parts]
    if not kept:
        names = sorted({item.split for item in items if item.split is not None})
        advice = f"its splits are {', '.join(names)}" if names else "it names no splits, so leave the split out"
        raise UsageError(f"{file} has no captions of split {split}; {advice}")
    return kept


def check_apart(train: Iterable[CaptionedImage], dev: Iterable[CaptionedImage]) -> None:
    """Check that no image is in both sets: selecting a model on training images rewards overfitting.

    Raises:
        UsageError: an image is in both.
    """
    train_paths = {item.path for item in train}
    shared = [item.image for item in dev if item.path in train_paths]
    if shared:
        raise UsageError(
            f"{len(shared):,} images of the development set are trained on too, for example {shared[0]}: "
            "give separate caption files, or a split for each set"
        )
