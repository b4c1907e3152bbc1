"""Detects video containers by their first bytes, and checks the sizes that files declare.

The functions use no video library. They run before PyAV opens a file, so PyAV never guesses the format of a file, and
never opens a playlist that names other files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from edje_index.images.decode_limits import TooExpensiveError

ISO_MEDIA, MATROSKA, AVI = "mov", "matroska", "avi"
"""Names of the demuxers of FFmpeg: MP4 and QuickTime, Matroska and WebM, AVI."""

_QUICKTIME_BOXES = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_STILL_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1", b"mif2")
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_MAX_BOXES = 1_000_000

MAX_SAMPLES = 10_000_000
"""Largest number of samples (frames and packets) of all streams of an MP4: days of video, or 60 hours of AAC."""

MAX_STREAMS = 64
"""Largest number of streams of a video."""

_BOXES = frozenset(
    b"ftyp styp moov moof mdat free skip wide pnot uuid mfra sidx ssix meta pdin prft emsg udta".split()  # top level
)
_MAX_SAMPLES_PER_BYTE = 8  # the old audio codecs of QuickTime pack up to 6 samples into a byte
# FFmpeg reads these tables at any depth. So they are found by their names, wherever they are.
_TABLE = re.compile(rb"stsz|stz2|stsc|trun")
_COMPRESSED_INDEX = re.compile(rb"cmov.{4}dcomzlib", re.DOTALL)


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


def check_samples(data: bytes) -> None:
    """Check the numbers of samples that an ISO media file declares. FFmpeg allocates memory for each sample.

    Args:
        data: content of a file that is not truncated.

    Raises:
        TooExpensiveError: the file declares too many samples.
    """
    samples = sample_bytes = chunk_tables = 0
    for start, end in _index_boxes(data):
        if _COMPRESSED_INDEX.search(data, start, end):
            raise TooExpensiveError("the index of the video is compressed, so its size is unknown")
        for name in _TABLE.finditer(data, start, end):
            first, second = (int.from_bytes(data[name.end() + at : name.end() + at + 4], "big") for at in (4, 8))
            if name[0] == b"stsc":
                chunk_tables += 1
                if chunk_tables > MAX_STREAMS:
                    raise TooExpensiveError(f"the video has more than {MAX_STREAMS} tables of chunks")
                _check_chunks(data, name.end() + 8, first)
            elif name[0] == b"stsz" and first:  # all samples have the same size, often in uncompressed audio
                sample_bytes += first * second
            else:
                samples += first if name[0] == b"trun" else second
    if samples > MAX_SAMPLES:
        raise TooExpensiveError(f"the video declares {samples} samples, more than the limit of {MAX_SAMPLES}")
    if sample_bytes > len(data):
        raise TooExpensiveError(f"the video declares samples of {sample_bytes} bytes, but has {len(data)} bytes")


def _index_boxes(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the boxes on the top level of an ISO media file, except those that hold the samples."""
    for kind, offset, size in _boxes(data):
        if kind != b"mdat":
            yield offset, min(offset + max(size, 8), len(data))


def _check_chunks(data: bytes, offset: int, count: int) -> None:
    """Check the samples per chunk, the second number of each of the `count` entries of a table stsc at `offset`."""
    if count > MAX_SAMPLES:
        raise TooExpensiveError(f"the video declares {count} groups of chunks, more than the limit of {MAX_SAMPLES}")
    entries = max(0, min(count, (len(data) - offset) // 12))
    most = int(np.frombuffer(data, ">u4", 3 * entries, offset)[1::3].max(initial=0)) if entries else 0
    if most > _MAX_SAMPLES_PER_BYTE * len(data):
        raise TooExpensiveError(f"the video declares {most} samples in a chunk, but has {len(data)} bytes")


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, offset, size) of the boxes on the top level of an ISO media file (ISO/IEC 14496-12, 4.2).

    The last size can exceed the file, or be below 8 if bytes follow that are not a box.

    Raises:
        TooExpensiveError: there are too many boxes.
    """
    offset = 0
    for _ in range(_MAX_BOXES):
        if offset >= len(data):
            return
        size, kind = int.from_bytes(data[offset : offset + 4], "big"), data[offset + 4 : offset + 8]
        if size == 1:
            size = int.from_bytes(data[offset + 8 : offset + 16], "big")
        if size == 0:  # the last box, up to the end of the file
            size = len(data) - offset
        yield kind, offset, size
        if size < 8:
            return
        offset += size
    raise TooExpensiveError(f"the video has more than {_MAX_BOXES} boxes")


def _cut_boxes(data: bytes) -> str | None:
    """Do the same as `truncation` for an ISO media file."""
    complete: set[bytes] = set()
    for kind, offset, size in _boxes(data):
        is_whole = b"moov" in complete and not complete.isdisjoint({b"mdat", b"moof"})
        if size < 8 or (is_whole and kind not in _BOXES):  # bytes that were appended to the file
            break
        if offset + size > len(data):
            return _shortage(data, f"the box {kind.decode('latin-1')!r}", offset + size)
        complete.add(kind)
    return None if b"moov" in complete else "the file ends before its index (the box moov)"


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
