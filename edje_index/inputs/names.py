"""What the names of files tell: which are images and clips, and which files hold the
metadata of an image.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

IMAGE_SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .jif .png .apng .gif .webp .bmp .dib .tif .tiff .ppm .pgm"
    b" .pbm .pnm .pfm .avif .avifs .heic .heics .heif .heifs .hif .jp2 .j2k .j2c .jpc"
    b" .jpf .jpx .jxl .mpo .qoi".split()
)
"""Suffixes of inputs. Formats that cannot be decoded (JPEG XL) become failed
rows instead of ignored files.
"""

VIDEO_SUFFIXES = frozenset(b".mp4 .m4v .mov .qt .3gp .3g2 .webm .mkv .avi".split())
"""Suffixes of inputs if clips are indexed."""

SIDECAR_SUFFIXES = (".json", ".txt")
"""Suffixes of the files with the metadata of an image: an object of values, and one
caption per line.
"""

MAX_SIDECAR_BYTES = 1 << 20


def has_input_suffix(name: bytes, clips: bool) -> bool:
    """Return True if the file name has an image suffix, or with `clips` a video
    suffix.
    """
    suffix = os.path.splitext(name)[1].lower()
    return suffix in IMAGE_SUFFIXES or (clips and suffix in VIDEO_SUFFIXES)


def is_litter(directory: bytes) -> bool:
    """Return True for the name of a directory that a NAS, an archiver or a photo
    program fills with thumbnails, deleted files or previews.
    """
    return directory in (b"@eaDir", b"#recycle", b"__MACOSX") or directory.endswith(
        b".lrdata"
    )


def sample_of(name: bytes) -> bytes:
    """Return the path up to the first dot of the file name, which the members of a
    WebDataset sample have in common.
    """
    folder, slash, base = name.rpartition(b"/")
    return folder + slash + base.partition(b".")[0]


def join_sidecars(names: Iterable[bytes], clips: bool) -> dict[bytes, dict[str, bytes]]:
    """Return the names of the metadata files of each input, by suffix. The same rule
    holds for a directory, a tar and a zip.

    NAME.txt and NAME.json belong to NAME.jpg. If there is no input NAME with a suffix,
    they belong to all inputs of the sample NAME, for example NAME.left.jpg. An input
    may lack a suffix, but not begin with a dot.
    """
    inputs_of_name: dict[bytes, list[bytes]] = {}
    inputs_of_sample: dict[bytes, list[bytes]] = {}
    sidecars: list[tuple[bytes, str, bytes]] = []
    for name in names:
        stem, dotted = os.path.splitext(name)
        suffix = os.fsdecode(dotted).lower()
        if os.path.basename(name).startswith(b"."):
            continue
        if suffix in SIDECAR_SUFFIXES:
            sidecars.append((stem, suffix, name))
        elif not suffix or has_input_suffix(name, clips):
            inputs_of_name.setdefault(stem, []).append(name)
            inputs_of_sample.setdefault(sample_of(name), []).append(name)
    joined: dict[bytes, dict[str, bytes]] = {}
    sidecars.sort(key=lambda each: (each[0] not in inputs_of_name, each))
    for stem, suffix, name in sidecars:
        for each in inputs_of_name.get(stem, []) or inputs_of_sample.get(stem, []):
            joined.setdefault(each, {}).setdefault(suffix, name)
    return joined
