"""Reads the captions of images from files in common formats.

- ``*.jsonl``, ``*.ndjson``: one JSON object per line: {"image": name, "captions":
  [...]}. The keys "split" and "image_id" are optional. "caption": "..." may replace a
  list of one caption.
- ``*.json``: a list of these objects, a Karpathy split file, or a COCO caption file.
- ``*.parquet``, ``*.csv``, ``*.tsv``: one column per key of these objects.
- ``*.tar``: a WebDataset shard. A sample is KEY.jpg with KEY.txt (one caption per
  line), or KEY.jpg with KEY.json (the object without "image"). Images and texts are
  joined in the same way as in a build.

Records of the same image and split are merged into one image with all their captions.
"""

from __future__ import annotations

import csv
import html
import json
import os
import string
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from edje_index.images.decode import ImageError
from edje_index.inputs.containers import members_with_sidecars
from edje_index.inputs.json_lines import read_json_lines, text_lines
from edje_index.inputs.names import MAX_SIDECAR_BYTES
from edje_index.inputs.ranges import open_file, open_ranged
from edje_index.inputs.refs import display_path
from edje_index.inputs.tars import TarArchive
from storage_formats.errors import UsageError
from storage_formats.format.parquet import iter_batches, open_parquet
from storage_formats.format.source_columns import CAPTION_COLUMNS
from storage_formats.remote.urls import scheme_of

IMAGE_KEYS = (
    "image",
    "path",
    "image_path",
    "file_name",
    "filename",
    "filepath",
    "file",
    "uri",
    "url",
)
ID_KEY = "image_id"
SPLIT_KEY = "split"

_BLANK_CATEGORIES = "CZPM"
"""First letters of the Unicode categories whose characters do not make a word: C
(invisible characters), Z (whitespace), P (punctuation) and M (marks on letters).
"""

_BLANK_CHARACTERS = frozenset(string.punctuation + "\u115f\u1160\u3164\uffa0")
"""Other characters that do not make a word: the ASCII symbols such as $ and +, which
text cleaning can remove as punctuation, and Hangul fillers, which are letters but
invisible. Emoji and other symbols make a word.
"""

_PARQUET_BATCH = 4096
# Karpathy's COCO file calls some validation images "restval". By convention, they are
# used for training.
_PARTS_OF_SPLIT = {"train": frozenset({"train", "restval"})}


@dataclass(frozen=True)
class CaptionRecord:
    """The captions of one image in one record of a caption file.

    Attributes:
        image: name of the image, as in the record.
        captions: the captions that are not blank; empty if all captions are blank. A
            caption is blank if it has only whitespace, punctuation (which includes the
            symbols of ASCII) and invisible characters.
        split: name of the split; None if the record has no split.
        image_id: identifier of the image; None if the record has no identifier.
        blank: number of captions that are not in `captions`, because they are blank or
            missing. An image without captions counts as one missing caption.
    """

    image: str
    captions: tuple[str, ...]
    split: str | None = None
    image_id: str | None = None
    blank: int = 0


@dataclass(frozen=True, slots=True)
class CaptionedImage:
    """One image and its captions.

    Attributes:
        image: name of the image, as in the caption file.
        path: absolute path or URL of the image, or "<tar>!<member>" for an image in a
            tar file.
        captions: the captions, at least one. No caption is blank.
        split: name of the split in the caption file; None if the caption file names no
            split.
        image_id: identifier of the image in the caption file; equal to `image` if the
            file has no identifiers.
        row_id: row of the index that holds the captions; None if they are from a
            caption file.
    """

    image: str
    # A string, because a `Path` would take more memory than all other attributes.
    path: str
    captions: tuple[str, ...]
    split: str | None
    image_id: str
    row_id: int | None = None


def read_captions(
    path: str | Path,
    images: str | Path | None = None,
    split: str | None = None,
) -> list[CaptionedImage]:
    """Read a caption file with `read_caption_file`, and return the captioned images.

    If blank or missing captions are left out, a warning gives their number.
    """
    items, blank = read_caption_file(path, images, split)
    if blank:
        warnings.warn(
            f"{path}: missing or blank captions are left out: {blank:,}",
            RuntimeWarning,
            stacklevel=2,
        )
    return items


def read_caption_file(
    path: str | Path,
    images: str | Path | None = None,
    split: str | None = None,
) -> tuple[list[CaptionedImage], int]:
    """Read a caption file.

    Args:
        path: path of the caption file. The suffix determines the format.
        images: base directory of relative image paths; None for the directory of
            `path`. The directory need not exist, because an index may be used on a
            machine that does not have its photos.
        split: read only this split. The split "train" includes Karpathy's split
            "restval".

    Returns:
        The captioned images in file order, and the number of captions that are left
        out, because they are missing or blank. Images without any other caption are
        left out, too.

    Raises:
        UsageError: the file cannot be read, a record is malformed, or the file has no
            captions of `split`.
    """
    file = Path(path)
    folder = os.path.abspath(file.parent if images is None else images)
    tar = (
        display_path(os.path.abspath(os.fsencode(file)))
        if file.suffix.lower() == ".tar"
        else None
    )
    parts = None if split is None else _PARTS_OF_SPLIT.get(split, frozenset({split}))
    merged: dict[tuple[str, str | None], CaptionedImage] = {}
    blank = 0
    for record in read_records(file):
        blank += record.blank if parts is None or record.split in parts else 0
        if record.captions:
            location = record.image
            if scheme_of(record.image) is None:
                name = f"{tar}!{record.image}"
                if tar is None:
                    name = os.path.join(folder, record.image)
                location = os.path.normpath(name)
            first = merged.get((location, record.split))
            merged[location, record.split] = (
                CaptionedImage(
                    record.image,
                    location,
                    record.captions,
                    record.split,
                    record.image_id or record.image,
                )
                if first is None
                else replace(first, captions=first.captions + record.captions)
            )
    if not merged:
        raise UsageError(
            f"{file} contains no captions ({blank:,} are blank or missing); give each"
            " photo 'captions', a list of strings, or 'caption', a string"
        )
    items = [item for item in merged.values() if parts is None or item.split in parts]
    if not items:
        names = sorted(
            {item.split for item in merged.values() if item.split is not None}
        )
        advice = (
            f"use one of {', '.join(names)}"
            if names
            else "the file names no splits, so do not give a split"
        )
        raise UsageError(f"{file} has no captions of the split '{split}'; {advice}")
    return items, blank


def check_image_directory(images: str | Path | None) -> None:
    """Raise UsageError if the base directory `images` does not exist. Only callers that
    read the image files need it, so `read_captions` does not check it.
    """
    if images is not None and not Path(images).is_dir():
        raise UsageError(
            f"there is no directory {images}; give the base directory of the image"
            " paths"
        )


def check_apart(train: Iterable[CaptionedImage], dev: Sequence[CaptionedImage]) -> None:
    """Raise a UsageError if an image is in both the training set and the
    development set.
    """
    dev_paths = {item.path for item in dev}
    shared_paths = {item.path for item in train if item.path in dev_paths}
    shared = [item.image for item in dev if item.path in shared_paths]
    if shared:
        raise UsageError(
            f"{len(shared):,} images are in both the training set and the development"
            f" set, for example {shared[0]}: give separate caption files, or different"
            " splits"
        )


class _RecordError(Exception):
    """A record is malformed. `read_records` adds the position of the record to the
    message.
    """


def read_records(path: Path) -> Iterator[CaptionRecord]:
    """Yield the records of a caption file, in file order.

    Raises:
        UsageError: the file cannot be read, or a record is malformed. The message gives
            the position of the record.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"cannot read captions from {path}: the file name must end in one of"
            f" {', '.join(sorted(_READERS))}"
        )
    location = str(path)
    try:
        os.close(open_file(os.fsencode(path))[0])
        for position, value in reader(path):
            location = f"{path}, {position}"
            yield _record(value)
    except _RecordError as error:
        raise UsageError(f"{location}: {error}") from error
    except OSError as error:
        raise UsageError(
            f"cannot read captions from {path}: {error.strerror or error}; check the"
            " path and the permissions"
        ) from error


# the position of a record in its file, as text for error messages, and the record
_Located = tuple[str, Any]


def _json_lines(path: Path) -> Iterator[_Located]:
    for number, value, error in read_json_lines(path):
        if error:
            raise UsageError(f"{path}, line {number}: {error}")
        yield f"line {number}", value


def _json_file(path: Path) -> Iterator[_Located]:
    content = _parse_json(path.read_bytes())
    if isinstance(content, list):
        for number, value in enumerate(content, 1):
            yield f"item {number}", value
        return
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list):
        raise UsageError(
            f"{path} is in no known format: give a list of images with captions, a"
            " Karpathy file ('images' with 'sentences') or a COCO file ('images' and"
            " 'annotations')"
        )
    annotations = content.get("annotations")
    texts_by_image: dict[str, list[Any]] = {}
    if annotations is not None and not isinstance(annotations, list):
        raise UsageError(
            f"'annotations' in {path} must be a list, but is a"
            f" {type(annotations).__name__}"
        )
    # Section 4 of https://cocodataset.org/#format-data describes 'annotations'. Image
    # ids are compared as texts, because some tools write them as texts.
    for number, value in enumerate(annotations or (), 1):
        if not (
            isinstance(value, dict)
            and isinstance(value.get("image_id"), int | str)
            and "caption" in value
        ):
            raise UsageError(
                f"{path}, annotations {number}: the annotation has no 'image_id' or no"
                " 'caption'"
            )
        texts = texts_by_image.setdefault(str(value["image_id"]), [])
        texts.append(value["caption"])
    ids: set[str] = set()
    for number, value in enumerate(images, 1):
        if annotations is not None and isinstance(value, dict):
            image_id = str(value.get("id"))
            if image_id in ids:
                raise UsageError(
                    f"{path}, images {number}: an earlier image has the same id"
                    f" {image_id}; give each image an id of its own"
                )
            ids.add(image_id)
            value = {
                "file_name": value.get("file_name"),
                CAPTION_COLUMNS[0]: texts_by_image.get(image_id),
                ID_KEY: image_id,
            }
        yield f"images {number}", value
    if unknown := texts_by_image.keys() - ids:
        raise UsageError(
            f"{path} has captions of {len(unknown)} images that are not in 'images',"
            f" for example of the image_id {min(unknown)}: add these images, or remove"
            " their captions"
        )


def comma_rows(
    file: Iterable[str], name: str
) -> Iterator[tuple[int, list[str] | None]]:
    """Yield (number of the row's last line, fields) for each row of a comma-separated
    table. The fields are None if one of them is too long.

    Args:
        file: the lines of the table.
        name: name of the file in error messages.

    Raises:
        UsageError: a quoted text has no closing quotation mark.
    """
    at_end = False

    def lines() -> Iterator[str]:
        nonlocal at_end
        yield from file
        at_end = True

    rows = csv.reader(lines())
    while True:
        first = rows.line_num + 1
        try:
            row: list[str] | None = next(rows)
        except StopIteration:
            return
        except csv.Error:
            row = None
        # `csv` reads a further line for a row only while a quoted text is open. If
        # `csv` asks for a line after the last one, the quoted text has no end. If an
        # error occurs after the first line of a row, the quoted text is too long.
        if at_end or (row is None and rows.line_num > first):
            raise UsageError(
                f"the quoted text that begins in line {first} of {name} has no end or"
                " is too long; correct the quotation marks of this line"
            )
        if row != []:
            yield rows.line_num, row


def _text_table(path: Path) -> Iterator[_Located]:
    names: list[str] = []
    number = 0
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = comma_rows(file, str(path))
        # In most tab-separated tables, quotation marks have no special meaning.
        if path.suffix.lower() == ".tsv":
            rows = enumerate(
                csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1
            )
        try:
            for number, row in rows:
                if row is None:
                    raise csv.Error("a field is too long")
                if not row:
                    continue
                if not names:
                    names = row
                    _check_columns(names, path)
                elif any(row[len(names) :]):
                    raise UsageError(
                        f"{path}, line {number}: the line has {len(row)} fields, but"
                        f" the header has {len(names)}; put quotation marks around"
                        " texts with commas, remove tabs from texts, or write JSON"
                        " Lines"
                    )
                else:
                    yield f"line {number}", dict(zip(names, row, strict=False))
        except (csv.Error, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path} is damaged after line {number}: {error}; write this"
                " file again, in UTF-8"
            ) from error


def _check_columns(names: Sequence[str], path: Path) -> None:
    """Raise UsageError if a table has no column of images or no column of captions, or
    if it has two columns with the name of such a column.
    """
    for keys in (IMAGE_KEYS, CAPTION_COLUMNS):
        used = next(filter(names.__contains__, keys), keys[0])
        if names.count(used) != 1:
            raise UsageError(
                f"{path} needs one column named {used}, but has the columns"
                f" {', '.join(map(repr, names))}; rename the columns"
            )


def _parquet(path: Path) -> Iterator[_Located]:
    number = 0
    try:
        with open_parquet(path) as file:
            record_keys = (*IMAGE_KEYS, *CAPTION_COLUMNS, ID_KEY, SPLIT_KEY)
            names = file.schema_arrow.names
            _check_columns(names, path)
            columns = [name for name in record_keys if name in names]
            for batch in iter_batches(file, _PARQUET_BATCH, columns):
                for value in batch.to_pylist():
                    number += 1
                    yield f"row {number}", value
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is damaged after row {number}: {error}; write or copy this Parquet"
            " file again"
        ) from error


def _webdataset(path: Path) -> Iterator[_Located]:
    """Yield one record for each image of a WebDataset shard that has a text or JSON
    file with its captions.
    """
    try:
        with open_ranged(os.fsencode(path), only_headers=True) as file:
            for member, contents in members_with_sidecars(
                TarArchive(file), clips=False
            ):
                if contents:
                    name = os.fsdecode(member.name)
                    try:
                        yield f"sample {name}", _sample(name, contents)
                    except _RecordError as error:
                        message = f"{path}, sample {name}: {error}"
                        raise UsageError(message) from error
    except ImageError as damage:
        raise UsageError(
            f"{path} is not an intact tar file: {damage.detail}; write or copy this"
            " file again"
        ) from damage


def _sample(name: str, contents: Mapping[str, bytes | None]) -> Any:
    if None in contents.values():
        raise _RecordError(
            f"the text beside it cannot be read, or has over {MAX_SIDECAR_BYTES} bytes"
        )
    texts = {suffix: content or b"" for suffix, content in contents.items()}
    value = _parse_json(texts[".json"]) if ".json" in texts else {}
    if isinstance(value, dict):
        if ".txt" in texts:
            value[CAPTION_COLUMNS[0]] = text_lines(_decode(texts[".txt"])) or [""]
        value |= {IMAGE_KEYS[0]: name, ID_KEY: os.path.splitext(name)[0]}
    return value


_READERS: Mapping[str, Callable[[Path], Iterator[_Located]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_file,
    ".parquet": _parquet,
    ".csv": _text_table,
    ".tsv": _text_table,
    ".tar": _webdataset,
}


def _record(value: Any) -> CaptionRecord:
    """Return the `CaptionRecord` of a record in any of the formats. The record must
    have an image name; a split and an identifier are optional. Raise _RecordError if
    the record is malformed.
    """
    if not isinstance(value, dict):
        raise _RecordError("the record is not a JSON object")
    key = next((key for key in IMAGE_KEYS if value.get(key) is not None), IMAGE_KEYS[0])
    name = value.get(key)
    texts = next(
        (value[key] for key in CAPTION_COLUMNS if not _is_missing(value.get(key))), None
    )
    image_id = value.get(ID_KEY)
    # A record of a Karpathy file has the captions in 'sentences'.
    if texts is None and isinstance(sentences := value.get("sentences"), list):
        texts = [
            sentence.get("raw", sentence) if isinstance(sentence, dict) else sentence
            for sentence in sentences
        ]
        image_id = value.get("cocoid", value.get("imgid"))
        # In these records, 'filepath' is the folder of the image, not its path.
        if key == "filepath":
            key = "filename"
            name = None
        elif isinstance(name, str) and isinstance(folder := value.get("filepath"), str):
            name = os.path.join(folder, name)
    if not isinstance(name, str) or not name:
        raise _RecordError(f"the record has no file name in '{key}'")
    try:
        is_possible = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        # An escape in JSON can stand for a lone surrogate, which no file name has.
        is_possible = False
    if not is_possible:
        raise _RecordError(f"the value {name!r} of '{key}' cannot be a file name")
    # Tools such as pandas write a list to a text column as a text in brackets.
    if (
        isinstance(texts, str)
        and texts.startswith("[")
        and texts.endswith("]")
        and texts == value.get("captions")
    ):
        try:
            texts = json.loads(texts)
        except (ValueError, RecursionError):
            raise _RecordError(
                "'captions' is in brackets but is no JSON list; write a list in JSON,"
                " or one line per caption in a column 'caption'"
            ) from None
    if isinstance(texts, str):
        texts = [texts]
    single = value.get("caption")
    if isinstance(single, str) and isinstance(texts, list) and single not in texts:
        texts = [*texts, single]
    if texts is None:
        texts = [None]
    if not isinstance(texts, list):
        raise _RecordError(
            "the captions are neither a string nor a list of strings; correct them"
        )
    given = len(texts)
    texts = [text for text in texts if not _is_missing(text)]
    if not all(isinstance(text, str) for text in texts):
        raise _RecordError("one of the captions is not a string; remove this caption")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        # An escape in JSON can stand for a lone surrogate, which UTF-8 cannot encode.
        raise _RecordError(
            "one of the captions contains a lone surrogate, which is not valid Unicode;"
            " remove this caption"
        ) from error
    kept = tuple(text.strip() for text in texts if not _is_blank(text))
    split, image_id = (
        None if label is None else str(label)
        for label in (value.get(SPLIT_KEY), image_id)
    )
    return CaptionRecord(name, kept, split, image_id, blank=(given or 1) - len(kept))


def _is_missing(value: Any) -> bool:
    """Return True for null, and for NaN, which pandas writes in place of null."""
    # Only NaN differs from itself.
    return value is None or value != value


def _is_blank(text: str) -> bool:
    """Return True if `text` has no word. This means that text cleaning and the
    tokenizers keep none of its characters.
    """
    return all(
        character in _BLANK_CHARACTERS
        or unicodedata.category(character)[0] in _BLANK_CATEGORIES
        # Text cleaning also unescapes HTML twice.
        for character in html.unescape(html.unescape(text))
    )


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(_decode(data))
    except (ValueError, RecursionError) as error:
        raise _RecordError(f"the text is not JSON: {error}") from error


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _RecordError(f"the text is not UTF-8: {error}") from error
