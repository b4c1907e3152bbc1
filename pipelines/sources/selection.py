"""Decides which files of directories and tar archives are inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from edje_index.images.clips import clip_format
from edje_index.images.decode import image_format
from edje_index.images.inputs import display_path

IMAGE_SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .jif .png .apng .gif .webp .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .pfm"
    b" .avif .avifs .heic .heif .hif .jp2 .j2k .j2c .jpc .jpf .jpx .jxl .mpo .qoi".split()
)
"""Suffixes of inputs. Formats that cannot be decoded (HEIC, JPEG XL) become failed rows instead of ignored files."""

VIDEO_SUFFIXES = frozenset(b".mp4 .m4v .mov .qt .3gp .3g2 .webm .mkv .avi".split())
"""Suffixes of inputs if clips are indexed."""

_LONGEST_SUFFIX = 12
_MAX_KEYS = 100


class Ignored(dict[str, int]):
    """Counts the entries that are not inputs, by suffix or by reason in parentheses."""

    def count(self, key: str, entries: int = 1) -> None:
        """Count entries under `key`, or under "(other)" if the key is unusual."""
        if key not in self and ((len(key) > _LONGEST_SUFFIX and key[0] == ".") or len(self) >= _MAX_KEYS):
            key = "(other)"
        self[key] = self.get(key, 0) + entries

    def add(self, counts: Mapping[str, int]) -> None:
        """Add the counts of another source."""
        for key, count in counts.items():
            self.count(key, count)


def has_input_suffix(name: bytes, clips: bool) -> bool:
    """Return True if the file name has an image suffix, or with `clips` a video suffix."""
    suffix = os.path.splitext(name)[1].lower()
    return suffix in IMAGE_SUFFIXES or (clips and suffix in VIDEO_SUFFIXES)


def is_input(head: bytes, clips: bool) -> bool:
    """Return True if a file begins like an image, or with `clips` like a clip. `head` has `HEAD_BYTES` bytes."""
    return image_format(head) is not None or (clips and clip_format(head) is not None)


def ignored_as(name: bytes, read_head: Callable[[], bytes], *, clips: bool) -> str | None:
    """Return the key under which `Ignored` counts a regular file; None if the file is an input.

    Args:
        name: name of the file, without directories.
        read_head: function that returns the first bytes of the file, or raises OSError. This function is called only
            if the name has no suffix.
        clips: True if clips are inputs, too.
    """
    if name.startswith(b"."):
        return "(hidden)"
    if has_input_suffix(name, clips):
        return None
    suffix = os.path.splitext(name)[1].lower()
    if suffix:
        return display_path(suffix)
    return None if is_input(read_head(), clips) else "(no suffix)"
