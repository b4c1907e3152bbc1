"""Captions of images, read from the files that people have them in.

    *.jsonl, *.ndjson   a line an image: {"image": name, "captions": [...] or "caption": "...", "split"?, "image_id"?}
    *.json              the same objects in one list; Karpathy's split files (COCO, Flickr8k, Flickr30k: "images" with
                        "sentences"); COCO's caption files ("images" and "annotations")
    *.parquet           columns of the same names
    *.tar               a WebDataset shard: KEY.jpg with KEY.txt (a caption a line) or KEY.json (the same object)

The forms themselves are in ``caption_formats``. Lines about the same image become one item.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from edje_index.captions.formats import CaptionRecord, read_records
from storage_formats.errors import UsageError

# Karpathy's COCO file: images of the validation set that everybody trains on.
_PARTS_OF_SPLIT = {"train": frozenset({"train", "restval"})}


@dataclass(frozen=True)
class CaptionedImage:
    """One image with what people said of it.

    Attributes:
        image: its name as the file of captions has it.
        path: absolute path, or "<tar>!<member>".
        captions: at least one, none blank.
        split: as the file says; None where it says nothing.
        image_id: the file's own identifier, else `image`.
    """

    image: str
    path: Path
    captions: tuple[str, ...]
    split: str | None
    image_id: str


def read_captions(path: str | Path, images: str | Path | None = None, split: str | None = None) -> list[CaptionedImage]:
    """Read a file of captions, in its order.

    Args:
        path: the file; its suffix says what it is.
        images: folder that relative image names begin at; the file's own folder where it is None.
        split: keep this split alone; "train" takes Karpathy's "restval" with it.

    Raises:
        UsageError: the file cannot be read or has another form (with the place of the first fault), or it holds
            nothing of `split`.
    """
    file = Path(path)
    folder = Path(os.path.abspath(file.parent if images is None else images))
    if images is not None and not folder.is_dir():
        raise UsageError(f"{images} is no folder of images")
    items = _merged(_item(record, folder) for record in read_records(file))
    if not items:
        raise UsageError(f"{file} holds no captions")
    return items if split is None else _only(items, split, file)


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
    """One item for an image and split, at its first place, with all its captions."""
    found: dict[tuple[Path, str | None], CaptionedImage] = {}
    for item in items:
        key = (item.path, item.split)
        known = found.get(key)
        found[key] = item if known is None else replace(known, captions=known.captions + item.captions)
    return list(found.values())


def _only(items: list[CaptionedImage], split: str, file: Path) -> list[CaptionedImage]:
    wanted = _PARTS_OF_SPLIT.get(split, frozenset({split}))
    kept = [item for item in items if item.split in wanted]
    if not kept:
        names = sorted({item.split for item in items if item.split is not None})
        said = f"its splits: {', '.join(names)}" if names else "it names no splits, so leave the split out"
        raise UsageError(f"{file} holds nothing of split '{split}'; {said}")
    return kept


def check_apart(trained: Iterable[CaptionedImage], dev: Iterable[CaptionedImage]) -> None:
    """UsageError where images of `dev` are trained on: what is chosen by them would be chosen by heart."""
    known = {item.path for item in trained}
    shared = [item.image for item in dev if item.path in known]
    if shared:
        raise UsageError(
            f"{len(shared):,} images of --dev are trained on too, {shared[0]} for one: name the parts with --split and "
            "--dev-split, or give other files"
        )
