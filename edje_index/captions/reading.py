"""Reads the captions of images from files in common formats.

- ``*.jsonl``, ``*.ndjson``: one JSON object per line: {"image": name, "captions": [...]}. The keys "split" and
  "image_id" are optional. "caption": "..." may replace a list of one caption.
- ``*.json``: a list of these objects, a Karpathy split file, or a COCO caption file.
- ``*.parquet``: one column per key of these objects.
- ``*.tar``: a WebDataset shard. A sample is KEY.jpg with KEY.txt (one caption per line), or KEY.jpg with KEY.json (the
  object without "image").

Records of the same image and split are merged.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edje_index.captions.formats import CaptionRecord, read_records
from storage_formats.errors import UsageError

# In Karpathy's COCO split, "restval" names validation images that are used for training by convention.
_PARTS_OF_SPLIT = {"train": frozenset({"train", "restval"})}


@dataclass(frozen=True, slots=True)
class CaptionedImage:
    """One image and its captions.

    Attributes:
        image: name of the image in the caption file.
        path: absolute path of the image, or "<tar>!<member>" for an image in a tar file.
        captions: the captions, at least one. No caption is blank.
        split: name of the split in the caption file; None if the caption file names no split.
        image_id: identifier of the image in the caption file; equal to `image` if the file has no identifiers.
    """

    image: str
    path: str  # not a Path, which would take more memory than all other attributes
    captions: tuple[str, ...]
    split: str | None
    image_id: str


@dataclass(frozen=True)
class CaptionFile:
    """The content of a caption file, or of one split of a caption file.

    Attributes:
        items: the captioned images, in file order.
        blank: number of blank captions that were left out. Images with only blank captions were left out too.
    """

    items: list[CaptionedImage]
    blank: int


def read_captions(path: str | Path, images: str | Path | None = None, split: str | None = None) -> list[CaptionedImage]:
    """Read a caption file with `read_caption_file`, and return the captioned images.

    Warn if blank captions are left out.
    """
    content = read_caption_file(path, images, split)
    if content.blank:
        warnings.warn(f"{path}: blank captions are left out: {content.blank:,}", RuntimeWarning, stacklevel=2)
    return content.items


def read_caption_file(path: str | Path, images: str | Path | None = None, split: str | None = None) -> CaptionFile:
    """Read a caption file.

    Args:
        path: path of the caption file. The suffix determines the format.
        images: base directory of relative image paths. It need not exist, because an index may be used on a machine
            without its photos. The default is the directory of `path`.
        split: read only this split. The split "train" includes Karpathy's split "restval".

    Raises:
        UsageError: the file cannot be read, a record is malformed, or the file has no captions of `split`.
    """
    file = Path(path)
    folder = Path(os.path.abspath(file.parent if images is None else images))
    parts = None if split is None else _PARTS_OF_SPLIT.get(split, frozenset({split}))
    kept, blank = [], 0
    for record in read_records(file):
        blank += record.blank if parts is None or record.split in parts else 0
        if record.captions:
            kept.append(_item(record, folder))
    items = _merged(kept)
    if not items:
        raise UsageError(f"{file} contains no captions" + (f" except {blank:,} blank captions" if blank else ""))
    return CaptionFile(items if parts is None else _of_split(items, parts, f"'{split}'", file), blank)


def check_image_directory(images: str | Path | None) -> None:
    """Raise a UsageError if the base directory of the images is missing. For callers that read the image files."""
    if images is not None and not Path(images).is_dir():
        raise UsageError(f"there is no directory {images}; give the base directory of the image paths")


def _item(record: CaptionRecord, folder: Path) -> CaptionedImage:
    path = record.path or os.path.join(folder, record.image)
    return CaptionedImage(
        image=record.image,
        path=os.path.normpath(path),
        captions=record.captions,
        split=record.split,
        image_id=record.image_id or record.image,
    )


def _merged(items: Iterable[CaptionedImage]) -> list[CaptionedImage]:
    """Merge items of the same image and split. A merged item has the position of its first part."""
    merged: dict[tuple[str, str | None], CaptionedImage] = {}
    for item in items:
        key = (item.path, item.split)
        first = merged.get(key)
        merged[key] = item if first is None else replace(first, captions=first.captions + item.captions)
    return list(merged.values())


def _of_split(items: list[CaptionedImage], parts: frozenset[str], split: str, file: Path) -> list[CaptionedImage]:
    kept = [item for item in items if item.split in parts]
    if not kept:
        names = sorted({item.split for item in items if item.split is not None})
        advice = f"use one of {', '.join(names)}" if names else "the file names no splits, so do not give a split"
        raise UsageError(f"{file} has no captions of the split {split}; {advice}")
    return kept


def check_apart(train: Iterable[CaptionedImage], dev: Sequence[CaptionedImage]) -> None:
    """Check that no image is in both the training set and the development set.

    Raises:
        UsageError: an image is in both sets.
    """
    dev_paths = {item.path for item in dev}
    shared_paths = {item.path for item in train if item.path in dev_paths}
    shared = [item.image for item in dev if item.path in shared_paths]
    if shared:
        raise UsageError(
            f"{len(shared):,} images are in both the training set and the development set, for example "
            f"{shared[0]}: give separate caption files, or different splits"
        )
