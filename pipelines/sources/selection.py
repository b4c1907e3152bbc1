"""Which names are inputs, and the count of those that are not. Shared by folders and tars."""

from __future__ import annotations

import os
from collections.abc import Callable

from edje_index.images.headers import image_format
from edje_index.images.inputs import display_path

IMAGE_SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .jif .png .apng .gif .webp .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .pfm"
    b" .avif .avifs .heic .heif .hif .jp2 .j2k .j2c .jpc .jpf .jpx .jxl .mpo .qoi".split()
)
"""Suffixes that make a file an input. Some (HEIC, JPEG XL) are not decoded: each such file is a row that says so."""

_LONGEST_SUFFIX = 12
_MOST_SUFFIXES = 100


class Ignored(dict[str, int]):
    """What was found and is no input: how many by suffix, or by what it is in round brackets."""

    def count(self, what: str) -> None:
        """Count one more; the number of different keys stays bounded."""
        if what not in self and ((len(what) > _LONGEST_SUFFIX and what[0] == ".") or len(self) >= _MOST_SUFFIXES):
            what = "(other)"
        self[what] = self.get(what, 0) + 1


def has_image_suffix(name: bytes) -> bool:
    """Whether a name alone makes a file an input."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def ignored_as(name: bytes, read_head: Callable[[], bytes]) -> str | None:
    """What to count a regular file under, or None where it is an input.

    Args:
        name: its name without folders.
        read_head: gives its first bytes; called only where the name has no suffix, and may raise OSError.
    """
    if name.startswith(b"."):
        return "(hidden)"
    suffix = os.path.splitext(name)[1].lower()
    if suffix in IMAGE_SUFFIXES:
        return None
    if suffix:
        return display_path(suffix)
    return None if image_format(read_head()) else "(no suffix)"
