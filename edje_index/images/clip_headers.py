"""Detects video containers by their first bytes, and detects truncated files by the sizes that they declare.

The functions use no video library. They run before PyAV opens a file, so PyAV never guesses the format of a file, and
never opens a playlist that names other files.
"""

from __future__ import annotations

from edje_index.images.decode_limits import TooExpensiveError

ISO_MEDIA, MATROSKA, AVI = "mov", "matroska", "avi"
"""Names of the demuxers of FFmpeg: MP4 and QuickTime, Matroska and WebM, AVI."""

_QUICKTIME_BOXES = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_STILL_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1", b"mif2")
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_MAX_BOXES = 1_000_000


def clip_format(head: bytes) -> str | None:
    """Return FFmpeg's name of the demuxer for a video file; None if the container is not supported.

    Args:
        head: the first `headers.HEAD_BYTES` bytes of the file.
    """
    if head.startswith(_EBML):
        return MATROSKA
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return AVI
    if head[4:8] == b"ftyp":
        return None if head[8:12] in _STILL_BRANDS else ISO_MEDIA
    return ISO_MEDIA if head[4:8] in _QUICKTIME_BOXES else None


def truncation(data: bytes, name: str) -> str | None:
    """Describe how a video file is truncated. Return None if the file has all the bytes that it declares.

    Args:
        data: content of the file.
        name: result of `clip_format`.

    Raises:
        TooExpensiveError: an MP4 has too many parts.
    """
    if name == AVI:
        return _shortage(data, "the AVI", 8 + int.from_bytes(data[4:8], "little"))
    return _cut_segment(data) if name == MATROSKA else _cut_boxes(data)


def _cut_boxes(data: bytes) -> str | None:
    """Do the same as `truncation` for an ISO media file. Its boxes are defined in ISO/IEC 14496-12, 4.2."""
    offset, has_index = 0, False
    for _ in range(_MAX_BOXES):
        if offset >= len(data):
            return None if has_index else "the file ends before its index (the box moov)"
        size, kind = int.from_bytes(data[offset : offset + 4], "big"), data[offset + 4 : offset + 8]
        if size == 1:
            size = int.from_bytes(data[offset + 8 : offset + 16], "big")
        if size == 0:  # the last box, up to the end of the file
            size = len(data) - offset
        if size < 8:  # not a box: bytes that were appended to the file
            return None if has_index else "the file ends before its index (the box moov)"
        has_index |= kind == b"moov"
        if offset + size > len(data):
            return _shortage(data, f"the box {kind.decode('latin-1')!r}", offset + size)
        offset += size
    raise TooExpensiveError(f"the video has more than {_MAX_BOXES} boxes")


def _cut_segment(data: bytes) -> str | None:
    """Do the same as `truncation` for a Matroska file (RFC 9559). A live recording declares no size."""
    header_size, start = _element_size(data, len(_EBML))
    start += header_size or 0
    if data[start : start + 4] != _SEGMENT:
        return "the file ends before its segment"
    size, start = _element_size(data, start + len(_SEGMENT))
    return None if size is None else _shortage(data, "the segment", start + size)


def _element_size(data: bytes, offset: int) -> tuple[int | None, int]:
    """Read the EBML size (RFC 8794) at `offset`. Return the size, or None if it is unknown, and the offset after it."""
    first = data[offset] if offset < len(data) else 0
    length = 9 - first.bit_length()
    bits = 7 * length
    value = int.from_bytes(data[offset : offset + length], "big") & ((1 << bits) - 1)
    return (None if value == (1 << bits) - 1 else value), offset + length


def _shortage(data: bytes, part: str, end: int) -> str | None:
    return f"{part} ends at byte {end}, but the file has {len(data)} bytes" if end > len(data) else None
