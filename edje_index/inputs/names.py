"""Rules for the names of files: which files are images and clips, and which files hold
the metadata of an image. Reads these metadata.
"""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from edje_index.inputs.json_lines import text_lines
from edje_index.inputs.ranges import POINTERS
from storage_formats.atomic import Json
from storage_formats.format.source_columns import CAPTION_COLUMNS
from storage_formats.remote.urls import WEB_SCHEMES, scheme_of

IMAGE_SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .jif .png .apng .gif .webp .bmp .dib .tif .tiff .ppm .pgm"
    b" .pbm .pnm .pfm .avif .avifs .heic .heics .heif .heifs .hif .jp2 .j2k .j2c .jpc"
    b" .jpf .jpx .jxl .mpo .qoi".split()
)
"""Suffixes of image files. They include the suffix of JPEG XL, which cannot be decoded,
so that such files become failed rows and are not silently ignored.
"""

VIDEO_SUFFIXES = frozenset(b".mp4 .m4v .mov .qt .3gp .3g2 .webm .mkv .avi".split())
"""Suffixes of video files, which are inputs if clips are indexed."""

SIDECAR_SUFFIXES = (".json", ".txt")
"""Suffixes of the files with the metadata of an image. A `.json` file contains an
object of values, and a `.txt` file contains one caption per line.
"""

MAX_SIDECAR_BYTES = 1 << 20

_LITTER = (b"@eaDir", b"#recycle", b"__MACOSX")


def file_name(spec: str) -> str:
    """Return `spec`, the path or URL of a file. The query and the fragment of a web URL
    are removed, so that the URL ends with the file suffix.
    """
    if scheme_of(spec) not in WEB_SCHEMES:
        return spec
    return urllib.parse.urlsplit(spec)._replace(query="", fragment="").geturl()


def has_input_suffix(name: bytes, clips: bool) -> bool:
    """Return True if the file name has an image suffix. If `clips` is True, a video
    suffix counts, too.
    """
    suffix = os.path.splitext(name)[1].lower()
    return suffix in IMAGE_SUFFIXES or (clips and suffix in VIDEO_SUFFIXES)


def is_hidden(name: bytes) -> bool:
    """Return True for the name of a hidden file or directory, and for that of a
    directory that a NAS, an archiver or a photo program fills with thumbnails, deleted
    files or previews.
    """
    return name.startswith(b".") or name.endswith(b".lrdata") or name in _LITTER


def sample_of(name: bytes) -> bytes:
    """Return the path up to the first dot of the file name. The members of a WebDataset
    sample have this part of their paths in common.
    """
    folder, slash, base = name.rpartition(b"/")
    return folder + slash + base.partition(b".")[0]


def join_sidecars(
    names: Iterable[bytes], clips: bool
) -> tuple[dict[bytes, dict[str, bytes]], set[bytes]]:
    """Return a dictionary from the name of each input to the names of its metadata
    files by suffix, and the names of all these files. The same rule holds for a
    directory, a tar and a zip.

    NAME.txt and NAME.json belong to the input NAME.jpg, or to NAME with another input
    suffix or without a suffix. If there is no such input, they belong to all inputs of
    the sample NAME, for example to NAME.left.jpg and NAME.right.jpg. Names that begin
    with a dot are left out. If several metadata files have the same name but for the
    case of their suffix, the first wins.
    """
    sidecars: dict[bytes, dict[str, bytes]] = {}
    inputs: dict[bytes, bytes] = {}
    for name in names:
        stem, dotted = os.path.splitext(name)
        suffix = os.fsdecode(dotted).lower()
        if os.path.basename(name).startswith(b"."):
            continue
        if suffix in SIDECAR_SUFFIXES:
            sidecars.setdefault(stem, {}).setdefault(suffix, name)
        elif not suffix or has_input_suffix(name, clips):
            inputs[name] = stem
    stems = set(inputs.values())
    joined: dict[bytes, dict[str, bytes]] = {}
    used: set[bytes] = set()
    for name, stem in inputs.items() if sidecars else ():
        sample = sample_of(name)
        shared = {} if sample in stems else sidecars.get(sample, {})
        # Metadata files with the exact name of the input win over those of the sample.
        if of_input := shared | sidecars.get(stem, {}):
            joined[name] = of_input
            used.update(of_input.values())
    return joined, used


def parse_sidecars(contents: Mapping[str, bytes | None]) -> tuple[Json, list[str]]:
    """Return (values, unreadable): the metadata in the files next to an image, and the
    suffixes of the files that cannot be used.

    The `.json` file contains an object of values. Each line of the `.txt` file is a
    caption. If the object has captions, they win over the lines.

    `contents` has the content of each file by suffix (see `SIDECAR_SUFFIXES`), or None
    for a file that cannot be used.
    """
    values: Json = {}
    unreadable = []
    for suffix, content in sorted(contents.items()):
        data = content or b""
        try:
            text = data.decode("utf-8-sig")
            parsed = (
                json.loads(text)
                if suffix == ".json"
                else {CAPTION_COLUMNS[0]: text_lines(text) or None}
            )
        except (ValueError, RecursionError):
            parsed = None
        if content is None or data.startswith(POINTERS) or not isinstance(parsed, dict):
            unreadable.append(suffix)
        else:
            values = filled(values, parsed)
    return values, unreadable


def filled(values: Mapping[Any, Any], others: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `values`, with each missing value taken from `others`. A value is missing
    if it is null, NaN, an empty text or an empty list.
    """
    given = {
        name: value
        for name, value in values.items()
        # NaN differs from itself. pandas writes it in place of null.
        if value not in (None, "", []) and value == value
    }
    return {**values, **others, **given}
