"""Cleans texts before tokenisation as open_clip does, without importing open_clip."""

from __future__ import annotations

import html
import string
from collections.abc import Callable
from typing import Final

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def clean_whitespace(text: str) -> str:
    """Repair broken encodings, decode HTML entities, and replace every run of whitespace by one space."""
    return " ".join(_repaired(text).split())


def clean_lower(text: str) -> str:
    """Clean `text` with `clean_whitespace` and convert it to lower case."""
    return clean_whitespace(text).lower()


def clean_canonicalize(text: str) -> str:
    """Clean `text` with `clean_lower` and remove punctuation."""
    plain = _repaired(text).replace("_", " ").translate(_NO_PUNCTUATION)
    return " ".join(plain.lower().split())


def _repaired(text: str) -> str:
    import ftfy  # only some bundles need it

    return html.unescape(html.unescape(ftfy.fix_text(text)))


CLEANERS: Final[dict[str, Callable[[str], str]]] = {
    "whitespace": clean_whitespace,
    "lower": clean_lower,
    "canonicalize": clean_canonicalize,
}
"""By open_clip's names."""
