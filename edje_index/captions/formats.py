"""Reads caption files: one function per format, and the checks of their records."""

from __future__ import annotations

import html
import json
import os
import string
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edje_index.filesystem import read_json_lines
from edje_index.images.decode import ImageError
from edje_index.images.inputs import display_path
from edje_index.images.ranges import open_ranged
from edje_index.images.tars import TarArchive
from storage_formats.errors import UsageError

IMAGE_KEYS = ("image", "path", "image_path", "file_name", "filename", "filepath")
CAPTION_KEYS = ("captions", "caption", "text")
ID_KEY, SPLIT_KEY = "image_id", "split"

_BLANK_CATEGORIES = "CZPM"
"""First letters of the Unicode categories of invisible characters, whitespace, punctuation, and marks on letters."""

_BLANK_CHARACTERS = frozenset(string.punctuation + "\u115f\u1160\u3164\uffa0")
"""Symbols of ASCII such as $ and +, which canonicalisation removes as punctuation, and Hangul fillers, which are
letters without a shape. Emoji and other symbols are words."""

_IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")
_PARQUET_BATCH = 4096
_MAX_TEXT_BYTES = 1 << 26  # of the captions of one image


@dataclass(frozen=True)
class CaptionRecord:
    """The captions of one image in one record of a caption file.

    Attributes:
        image: name of the image.
        captions: the captions that are not blank; empty if all captions are blank. A caption is blank if it has only
            whitespace, punctuation (which includes the symbols of ASCII) and invisible characters.
        split: name of the split; None if the record has no split.
        image_id: identifier of the image; None if the record has no identifier.
        path: "<tar>!<member>" for an image inside a tar file; otherwise None.
        blank: number of blank captions, which are not in `captions`.
    """

    image: str
    captions: tuple[str, ...]
    split: str | None = None
    image_id: str | None = None
    path: Path | None = None
    blank: int = 0


class RecordError(Exception):
    """A record is malformed. The caller adds the position of the record to the message."""


def read_records(path: Path) -> Iterator[CaptionRecord]:
    """Yield the records of a caption file, in file order.

    Raises:
        UsageError: the file cannot be read, or a record is malformed. The message gives the position of the record.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"cannot read captions from {path}: the file name must end in one of {', '.join(sorted(_READERS))}"
        )
    try:
        yield from reader(path)
    except OSError as error:
        raise UsageError(
            f"cannot read captions from {path}: {error.strerror or error}; check the path and the permissions"
        ) from error


def _json_lines(path: Path) -> Iterator[CaptionRecord]:
    for line in read_json_lines(path):
        with _located(path, f"line {line.number}"):
            if line.error is not None:
                raise RecordError(line.error)
            record = caption_record(line.value)
        yield record


def _json_file(path: Path) -> Iterator[CaptionRecord]:
    with _located(path):
        content = parse_json(path.read_bytes())
    if isinstance(content, list):
        yield from _convert_each(path, "item", content, caption_record)
    elif isinstance(content, dict) and isinstance(content.get("images"), list):
        if "annotations" in content:
            yield from _coco(path, content)
        else:
            yield from _convert_each(path, "images", content["images"], karpathy_record)
    else:
        raise UsageError(
            f"{path} is in no known format: give a list of images with captions, a Karpathy file "
            "('images' with 'sentences') or a COCO file ('images' and 'annotations')"
        )


def _convert_each(
    path: Path, name: str, values: list[Any], convert: Callable[[Any], CaptionRecord]
) -> Iterator[CaptionRecord]:
    for number, value in enumerate(values, 1):
        with _located(path, f"{name} {number}"):
            record = convert(value)
        yield record


def _coco(path: Path, content: Mapping[str, Any]) -> Iterator[CaptionRecord]:
    """Yield the records of a COCO caption file (https://cocodataset.org/#format-data, section 4)."""
    texts_by_image = _coco_annotations(path, content["annotations"])

    def convert(value: Any) -> CaptionRecord:
        name = file_name(value, "file_name")
        if not isinstance(value.get("id"), int | str | None):
            raise RecordError(f"the 'id' of the image must be a number or a text, but is {value['id']!r:.100}")
        texts, blank = captions(texts_by_image.pop(value.get("id"), []))
        return CaptionRecord(name, texts, image_id=optional_text(value.get("id")), blank=blank)

    yield from _convert_each(path, "images", content["images"], convert)
    if texts_by_image:
        raise UsageError(
            f"{path} has captions of {len(texts_by_image)} images that are not in 'images', for example "
            f"of the image_id {next(iter(texts_by_image))}: add these images, or remove their captions"
        )


def _coco_annotations(path: Path, annotations: Any) -> dict[Any, list[Any]]:
    if not isinstance(annotations, list):
        raise UsageError(f"'annotations' in {path} must be a list, but is a {type(annotations).__name__}")
    texts_by_image: dict[Any, list[Any]] = {}
    for number, value in enumerate(annotations, 1):
        with _located(path, f"annotations {number}"):
            if not (isinstance(value, dict) and isinstance(value.get("image_id"), int | str) and "caption" in value):
                raise RecordError("the annotation has no 'image_id' or no 'caption'")
            texts_by_image.setdefault(value["image_id"], []).append(value["caption"])
    return texts_by_image


def _parquet(path: Path) -> Iterator[CaptionRecord]:
    import pyarrow as pa

    from storage_formats.format.parquet import iter_batches, open_parquet

    number = 0
    try:
        with open_parquet(path) as file:
            record_keys = (*IMAGE_KEYS, *CAPTION_KEYS, ID_KEY, SPLIT_KEY)
            columns = [name for name in record_keys if name in file.schema_arrow.names]
            for batch in iter_batches(file, _PARQUET_BATCH, columns):
                for value in batch.to_pylist():
                    number += 1
                    with _located(path, f"row {number}"):
                        record = caption_record(value)
                    yield record
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is damaged after row {number}: {error}; write or copy this Parquet file again"
        ) from error


@dataclass
class _Sample:
    """One sample of a WebDataset shard: all members of the tar file with the same key."""

    images: list[str] = field(default_factory=list)
    text: bytes | None = None
    json: bytes | None = None


def _webdataset(path: Path) -> Iterator[CaptionRecord]:
    tar = display_path(os.path.abspath(os.fsencode(path)))
    for key, sample in _samples(path).items():
        if sample.images:
            with _located(path, f"sample {key}"):
                record = _sample_record(tar, key, sample)
            yield record


def _sample_record(tar: str, key: str, sample: _Sample) -> CaptionRecord:
    if len(sample.images) > 1:
        raise RecordError(
            f"a sample must have one image, but this one has {len(sample.images)}: {', '.join(sample.images)}"
        )
    value: Any = {} if sample.json is None else parse_json(sample.json)
    if not isinstance(value, dict):
        raise RecordError(f"the .json file of a sample must contain an object, but contains a {type(value).__name__}")
    if sample.text is not None:
        value[CAPTION_KEYS[0]] = [line for line in decode_text(sample.text).splitlines() if line.strip()] or [""]
    if not any(name in value for name in CAPTION_KEYS):
        raise RecordError("the sample has no captions: add a .txt file, or a .json file with 'captions' or 'caption'")
    member = sample.images[0]
    texts, blank = captions(caption_value(value))
    return CaptionRecord(
        image=member,
        captions=texts,
        blank=blank,
        split=optional_text(value.get(SPLIT_KEY)),
        image_id=key,
        path=Path(f"{tar}!{member}"),
    )


def _samples(path: Path) -> dict[str, _Sample]:
    """Return the samples of a WebDataset shard by key.

    A key is the member's path up to the first dot of the file name.
    """
    samples: dict[str, _Sample] = {}
    try:
        with open_ranged(os.fsencode(path), only_headers=True) as file:
            archive = TarArchive(file)
            for member in archive.members():
                name = os.fsdecode(member.name)
                folder, slash, base = name.rpartition("/")
                stem, _, suffix = base.partition(".")
                if member.problem is not None or not stem:
                    continue
                sample = samples.setdefault(folder + slash + stem, _Sample())
                if suffix.lower() in _IMAGE_SUFFIXES:
                    sample.images.append(name)
                elif suffix.lower() in ("txt", "json"):
                    data = archive.read(member.offset, member.size, _MAX_TEXT_BYTES)
                    setattr(sample, "text" if suffix.lower() == "txt" else "json", data)
    except ImageError as damage:
        raise UsageError(
            f"{path} is not an intact uncompressed tar file: {damage.detail}; write or copy this file again"
        ) from damage
    return samples


@contextmanager
def _located(path: Path, position: str = "") -> Iterator[None]:
    """Convert a `RecordError` of the `with` block to a `UsageError` that names the file and the position."""
    try:
        yield
    except RecordError as error:
        location = f"{path}, {position}" if position else str(path)
        raise UsageError(f"{location}: {error}") from error


def caption_record(value: Any) -> CaptionRecord:
    """Convert a JSON object or table row to a record.

    Args:
        value: object with an image name and captions. A split and an identifier are optional.

    Raises:
        RecordError: the record is malformed.
    """
    if not isinstance(value, dict):
        raise RecordError("the record is not a JSON object")
    image_key = next((key for key in IMAGE_KEYS if value.get(key) is not None), IMAGE_KEYS[0])
    texts, blank = captions(caption_value(value))
    return CaptionRecord(
        image=file_name(value, image_key),
        captions=texts,
        blank=blank,
        split=optional_text(value.get(SPLIT_KEY)),
        image_id=optional_text(value.get(ID_KEY)),
    )


def karpathy_record(value: Any) -> CaptionRecord:
    """Convert one element of the list "images" of a Karpathy split file.

    Raises:
        RecordError: the record is malformed.
    """
    name = file_name(value, "filename")
    sentences = value.get("sentences")
    if not isinstance(sentences, list):
        raise RecordError("the record has no list 'sentences'")
    texts, blank = captions([sentence.get("raw") if isinstance(sentence, dict) else None for sentence in sentences])
    return CaptionRecord(
        image=os.path.join(file_name(value, "filepath"), name) if "filepath" in value else name,
        captions=texts,
        blank=blank,
        split=optional_text(value.get(SPLIT_KEY)),
        image_id=optional_text(value.get("cocoid", value.get("imgid"))),
    )


def parse_json(data: bytes) -> Any:
    """Parse JSON text in UTF-8."""
    try:
        return json.loads(decode_text(data))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the text is not JSON: {error}") from error


def decode_text(data: bytes) -> str:
    """Decode UTF-8, with or without a byte-order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecordError(f"the text is not UTF-8: {error}") from error


def caption_value(value: Mapping[str, Any]) -> Any:
    """Return the value of the first key in `CAPTION_KEYS` whose value is not None.

    Return None if there is no such key.
    """
    return next((value[key] for key in CAPTION_KEYS if value.get(key) is not None), None)


def captions(value: Any) -> tuple[tuple[str, ...], int]:
    """Check a caption or a list of captions.

    Returns:
        (captions that are not blank, without surrounding whitespace; number of blank captions).

    Raises:
        RecordError: there is no caption, or a caption is not valid text.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise RecordError("this photo has no captions: give 'captions', a list of strings, or 'caption', a string")
    if not all(isinstance(text, str) for text in texts):
        raise RecordError("one of the captions is not a string; remove this caption")
    if not all(map(_is_encodable, texts)):
        raise RecordError(
            "one of the captions contains a lone surrogate, which is not valid Unicode; remove this caption"
        )
    kept = tuple(text.strip() for text in texts if not _is_blank(text))
    return kept, len(texts) - len(kept)


def file_name(value: Any, key: str) -> str:
    """Return ``value[key]``. Raise RecordError if this value cannot be a file name."""
    text = value.get(key) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text:
        raise RecordError(f"the record has no file name in '{key}'")
    try:
        possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate, from a JSON escape
        possible = False
    if not possible:
        raise RecordError(f"the value {text!r} of '{key}' cannot be a file name")
    return text


def optional_text(value: Any) -> str | None:
    """Return `value` as text; None remains None."""
    return None if value is None else str(value)


def _is_blank(text: str) -> bool:
    """Return True if `text` has no word: no character that text cleaning and the tokenizers keep."""
    return all(
        character in _BLANK_CHARACTERS or unicodedata.category(character)[0] in _BLANK_CATEGORIES
        for character in html.unescape(html.unescape(text))  # twice, as text cleaning does
    )


def _is_encodable(text: str) -> bool:
    """Return False if `text` contains a lone surrogate. A JSON escape can produce one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_READERS: dict[str, Callable[[Path], Iterator[CaptionRecord]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_file,
    ".parquet": _parquet,
    ".tar": _webdataset,
}
