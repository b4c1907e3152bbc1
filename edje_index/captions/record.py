"""Checks and converts caption records. A record is a JSON object or table row about one image."""

from __future__ import annotations

import html
import json
import os
import string
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMAGE_KEYS = ("image", "path", "image_path", "file_name", "filename", "filepath")
CAPTION_KEYS = ("captions", "caption", "text")
ID_KEY, SPLIT_KEY = "image_id", "split"

_BLANK_CATEGORIES = "CZPM"
"""First letters of the Unicode categories of invisible characters, whitespace, punctuation, and marks on letters."""

_BLANK_CHARACTERS = frozenset(string.punctuation + "\u115f\u1160\u3164\uffa0")
"""Symbols of ASCII such as $ and +, which canonicalisation removes as punctuation, and Hangul fillers, which are
letters without a shape. Emoji and other symbols are words."""


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
