"""Reads the captions of images from tables and archives.

A table is a file that `edje_index.inputs.tables` reads, with captions in a column
`captions`, `caption` or `text`. A column `split` is optional. In an archive, KEY.txt
and KEY.json hold the captions of KEY.jpg, as in WebDataset. A build reads tables and
archives in the same way.

Entries of the same image and split are merged into one image with all their captions.
"""

from __future__ import annotations

import html
import os
import string
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from edje_index.images.decode import ImageError
from edje_index.inputs.containers import (
    ARCHIVES,
    container_kind,
    members_with_sidecars,
)
from edje_index.inputs.names import parse_sidecars
from edje_index.inputs.ranges import open_ranged
from edje_index.inputs.refs import display_path
from edje_index.inputs.tables import SPLIT, Table
from storage_formats.atomic import Json
from storage_formats.errors import UsageError
from storage_formats.format.source_columns import captions_of
from storage_formats.remote.urls import scheme_of

_BLANK_CATEGORIES = "CZPM"
"""First letters of the Unicode categories whose characters do not make a word: C
(invisible characters), Z (whitespace), P (punctuation) and M (marks on letters).
"""

_BLANK_CHARACTERS = frozenset(string.punctuation + "\u115f\u1160\u3164\uffa0")
"""Other characters that do not make a word: the ASCII symbols such as $ and +, which
text cleaning can remove as punctuation, and Hangul fillers, which are letters but
invisible. Emoji and other symbols make a word.
"""

# Karpathy's COCO file calls some validation images "restval". By convention, they are
# used for training.
_PARTS_OF_SPLIT = {"train": frozenset({"train", "restval"})}


def is_of_split(value: object, split: str | None) -> bool:
    """Return True if `value`, that of a column `split`, belongs to `split`. The value
    may be a number. Every value belongs to None.
    """
    parts = _PARTS_OF_SPLIT.get(split or "", {split})
    return split is None or (value is not None and str(value) in parts)


@dataclass(frozen=True, slots=True)
class CaptionedImage:
    """One image and its captions.

    Attributes:
        path: absolute path or URL of the image, or "<archive>!<member>" for an image in
            an archive.
        captions: the captions, at least one. No caption is blank.
        split: name of the split in the caption file; None if the caption file names no
            split.
        row_id: row of the index that holds the captions; None if they are from a
            caption file.
    """

    # A string, because a `Path` would take more memory than all other attributes.
    path: str
    captions: tuple[str, ...]
    split: str | None
    row_id: int | None = None


def read_captions(
    path: str | Path,
    images: str | Path | None = None,
    split: str | None = None,
) -> list[CaptionedImage]:
    """Read a caption file, and return the captioned images in file order.

    Images without captions are left out. A warning gives the number of captions that
    are left out, because they are missing or blank.

    Args:
        path: path of a table or an archive. The suffix determines the format.
        images: base directory of relative image paths; None for the directory of
            `path`. The directory need not exist, because an index may be used on a
            machine that does not have its photos.
        split: read only this split. The split "train" includes Karpathy's split
            "restval".

    Raises:
        UsageError: the file cannot be read, an entry cannot be used, or the file has no
            captions of `split`.
    """
    file = Path(path)
    folder = os.path.abspath(file.parent if images is None else images)
    kind = container_kind(file.name)
    entries = _table_entries(file) if kind not in ARCHIVES else _samples(file, kind)
    # (location of an image, its split) -> its captions
    merged: dict[tuple[str, str | None], tuple[str, ...]] = {}
    blank = 0
    try:
        for where, name, values in entries:
            try:
                captions, left_out = usable_captions(values)
            except ValueError as error:
                raise UsageError(f"{where}: {error}") from error
            its_split = values.get(SPLIT)
            its_split = None if its_split is None else str(its_split)
            if is_of_split(its_split, split):
                blank += left_out
            if not captions:
                continue
            location = name
            if scheme_of(name) is None:
                location = os.path.normpath(os.path.join(folder, name))
            key = location, its_split
            merged[key] = merged.get(key, ()) + captions
    except (OSError, ValueError, ImageError, pa.ArrowException) as error:
        reason = getattr(error, "detail", None) or getattr(error, "strerror", None)
        raise UsageError(
            f"cannot read captions from {path}: {reason or error}; check the path, the"
            " permissions and the format"
        ) from error
    if not merged:
        raise UsageError(
            f"{file} contains no captions ({blank:,} are blank or missing); give each"
            " photo 'captions', a list of strings, or 'caption', a string"
        )
    items = [
        CaptionedImage(location, captions, its_split)
        for (location, its_split), captions in merged.items()
        if is_of_split(its_split, split)
    ]
    if not items:
        names = sorted({name for _, name in merged if name is not None})
        advice = (
            f"use one of {', '.join(names)}"
            if names
            else "the file names no splits, so do not give a split"
        )
        raise UsageError(f"{file} has no captions of the split '{split}'; {advice}")
    if blank:
        warnings.warn(
            f"{path}: missing or blank captions are left out: {blank:,}",
            RuntimeWarning,
            stacklevel=2,
        )
    return items


def usable_captions(values: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Return the captions of an image, and the number of captions that are left out,
    because they are blank or missing. An image without captions counts as one missing
    caption.

    A caption is blank if it has only whitespace, punctuation (which includes the
    symbols of ASCII) and invisible characters.

    Args:
        values: the columns of the image, see `captions_of`.

    Raises:
        ValueError: a caption is not a text.
    """
    # NaN differs from itself. pandas writes it in place of null.
    present = {name: value for name, value in values.items() if value == value}
    texts = captions_of(present)
    given = [text for text in texts if text is not None and text == text]
    for text in given:
        if not isinstance(text, str):
            raise ValueError(
                f"one of the captions is not a string, but {text!r}; correct or remove"
                " this caption"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                "one of the captions is not valid Unicode, because it contains a lone"
                " surrogate or bytes that are not UTF-8; remove this caption"
            ) from error
    kept = tuple(text.strip() for text in given if not is_blank(text))
    return kept, max(1, len(texts)) - len(kept)


# where an entry is, for error messages; the name of its image; its columns
_Located = tuple[str, str, Json]


def _table_entries(path: Path) -> Iterator[_Located]:
    table = Table(str(path))
    unit = "row" if table.suffix in (".parquet", ".json") else "line"
    table.check()
    for entry in table.entries():
        where = f"{path}, {unit} {entry.number}"
        if entry.problem:
            raise UsageError(f"{where}: {entry.problem}")
        name = entry.image
        if entry.container is not None:
            absolute = display_path(os.path.abspath(os.fsencode(path)))
            name = f"{absolute}!{table.column}/{entry.number - 1}"
        try:
            name = os.fsdecode(name)
            # An escape in JSON can stand for a lone surrogate, which no file name
            # has.
            if not name or b"\0" in os.fsencode(name):
                raise ValueError("no name of a file")
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{where}: the entry has no file name in '{table.column}', but {name!r}"
            ) from error
        yield where, name, entry.values


def _samples(path: Path, kind: str) -> Iterator[_Located]:
    """Yield the images of an archive that have a text or JSON file with their
    captions.
    """
    archive_path = os.path.abspath(os.fsencode(path))
    with open_ranged(archive_path, only_headers=True) as file:
        archive = ARCHIVES[kind](file)
        for member, contents in members_with_sidecars(archive, clips=False):
            if not contents:
                continue
            name = os.fsdecode(member.name)
            where = f"{path}, sample {name}"
            values, unreadable = parse_sidecars(contents)
            if unreadable:
                raise UsageError(
                    f"{where}: the file {unreadable[0]} beside the image cannot be"
                    " used; correct or remove it"
                )
            yield where, f"{display_path(archive_path)}!{name}", values


def is_blank(text: str) -> bool:
    """Return True if `text` has no word. This means that text cleaning and the
    tokenizers keep none of its characters.
    """
    return all(
        character in _BLANK_CHARACTERS
        or unicodedata.category(character)[0] in _BLANK_CATEGORIES
        # Text cleaning also unescapes HTML twice.
        for character in html.unescape(html.unescape(text))
    )
