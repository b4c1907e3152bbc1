"""Tells URLs from paths."""

from __future__ import annotations

import re

WEB_SCHEMES = ("http", "https")
HUB_SCHEME = "hf"
STORE_SCHEMES = ("s3", "gs", "az")
SCHEMES = (*WEB_SCHEMES, HUB_SCHEME, *STORE_SCHEMES)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL in lower case; None for a path."""
    match = _SCHEME.match(text)
    return None if match is None else match[1].lower()


def is_remote(path: bytes) -> bool:
    """Return True if `path` is a URL that this package reads."""
    return path.startswith(_PREFIXES)


_PREFIXES = tuple(f"{scheme}://".encode() for scheme in SCHEMES)
