"""Limits on the cost of decoding. Without them, a small file could take gigabytes, or
keep a decoder busy for minutes.

Pillow and PyAV check most sizes themselves. Each limit here stands for a crafted file
that takes more than 5 seconds or 1 GB without it. The limits count scans, reads and
pixels, not seconds, so a file fails on every machine or on none.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_SCANS = 100
"""Largest number of scans of a JPEG. Encoders write 1 to 18; libtiff has the same
limit for the JPEGs inside a TIFF.
"""

MAX_FULL_SCANS = 20
"""Largest number of scans of a JPEG of the largest allowed size. Each scan visits every
pixel, so a smaller JPEG may have more scans.
"""

MAX_READS = 2_500_000
"""Largest number of reads by a decoder. Pillow reads headers, and whole images of a
few formats, in small steps.
"""

MAX_PYTHON_PIXELS = 1 << 21
"""Largest number of pixels of an image that Pillow decodes in Python (QOI, plain-text
PPM and others). Decoding takes about a microsecond per pixel.
"""

BYTES_PER_PIXEL = 12
"""Bytes of memory per pixel that are enough to decode an image. A progressive CMYK
JPEG takes 8 for coefficients.
"""

# Pillow decodes every WebP as an animation: two canvases, two copies, and the file
_WEBP_BYTES_PER_PIXEL = 17

MAX_SAMPLES = 10_000_000
"""Largest number of samples (frames and packets) of all streams of an MP4: days of
video, or 60 hours of AAC.
"""

MAX_STREAMS = 64
"""Largest number of streams of a video."""

# of a plain-text PPM; Pillow copies a megabyte for each
_MAX_COMMENTS = 1000
# of a JPEG
_MAX_SEGMENTS = 100_000
# the markers of segments: TEM and RST0 to RST7 have no length
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
_START_OF_IMAGE = 0xD8
_END_OF_IMAGE = 0xD9
_START_OF_SCAN = 0xDA
_TIFF_TILE_SIZE = (322, 323)
_MAX_BOXES = 1_000_000
# the old audio codecs of QuickTime pack up to 6 samples into a byte
_MAX_SAMPLES_PER_BYTE = 8
# FFmpeg reads these tables at any depth, of any version. So they are found by their
# names, wherever they are except in texts.
_TABLE = re.compile(rb"stsz|stz2|stsc|trun|cmov.{4}dcomzlib", re.DOTALL)
# on the way to the texts, in which FFmpeg reads no boxes
_CONTAINERS = (b"moov", b"udta", b"ilst")
_TEXTS = (b"\xa9", b"desc", b"ldes", b"uuid")


class TooExpensiveError(Exception):
    """Decoding an input would take too long or too much memory. The message names
    the limit.
    """


class CountedReads(io.BytesIO):
    """A file in memory whose method `read` raises TooExpensiveError after
    `MAX_READS` calls.
    """

    def __init__(self, data: ReadableBuffer) -> None:
        super().__init__(data)
        self._reads_left = MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise TooExpensiveError(f"decoding takes more than {MAX_READS} reads")
        return super().read(size)


def can_allocate(size: int) -> bool:
    """Return True if the process can allocate `size` more bytes of memory now."""
    try:
        np.empty(size, np.uint8)
    except MemoryError:
        return False
    return True


def check_cost(image: Any, data: bytes, max_pixels: int) -> None:
    """Check the cost of decoding an opened image whose pixels are not decoded yet.

    The largest number of pixels of an image, `max_pixels`, determines the limits on
    JPEG scans and on WebP.

    Raises:
        TooExpensiveError: decoding the image would take too long or too much memory.
    """
    pixels = image.width * image.height
    if image.format in ("JPEG", "MPO"):
        limit = min(MAX_SCANS, MAX_FULL_SCANS * max_pixels // max(1, pixels))
        if len(list(itertools.islice(_scan_offsets(data), limit + 1))) > limit:
            raise TooExpensiveError(
                f"the JPEG of {pixels} pixels has more than {limit} scans"
            )
    if (
        image.format == "WEBP"
        and _WEBP_BYTES_PER_PIXEL * pixels > BYTES_PER_PIXEL * max_pixels
    ):
        limit = BYTES_PER_PIXEL * max_pixels // _WEBP_BYTES_PER_PIXEL
        raise TooExpensiveError(
            f"the WebP has {pixels} pixels, more than the limit of {limit} for this"
            " format"
        )
    # Pillow decodes whole tiles, and a tile may be larger than the image
    if image.format == "TIFF":
        width, height = (image.tag_v2.get(tag, 1) for tag in _TIFF_TILE_SIZE)
        if width * height > max_pixels:
            raise TooExpensiveError(
                f"tile size {width} x {height} is over the limit of {max_pixels} pixels"
            )
    # `Image.DECODERS` lists the decoders that are written in Python
    if any(tile[0] in Image.DECODERS for tile in image.tile):
        if pixels > MAX_PYTHON_PIXELS:
            raise TooExpensiveError(
                f"the image has {pixels} pixels, more than the limit of"
                f" {MAX_PYTHON_PIXELS} for this format"
            )
        if data[:2] in (b"P1", b"P2", b"P3") and data.count(b"#") > _MAX_COMMENTS:
            raise TooExpensiveError(
                f"the plain-text PPM has more than {_MAX_COMMENTS} comments"
            )


def _scan_offsets(jpeg: bytes) -> Iterator[int]:
    """Yield the offset of each scan header of a JPEG. Scans of embedded thumbnails
    are skipped.
    """
    offset = 2
    for _ in range(_MAX_SEGMENTS):
        marker = _MARKER.search(jpeg, offset)
        if marker is None or (kind := jpeg[marker.end() - 1]) in (
            _START_OF_IMAGE,
            _END_OF_IMAGE,
        ):
            return
        if kind == _START_OF_SCAN:
            yield marker.start()
        offset = marker.end() + int.from_bytes(
            jpeg[marker.end() : marker.end() + 2], "big"
        )
    raise TooExpensiveError(f"the JPEG has more than {_MAX_SEGMENTS} segments")


def check_samples(data: bytes) -> None:
    """Check the numbers of samples that an ISO media file declares. FFmpeg allocates
    memory for each sample.

    Raises:
        TooExpensiveError: the file declares too many samples.
    """
    samples = sample_bytes = chunk_tables = 0
    for table in itertools.chain.from_iterable(
        _TABLE.finditer(data, *box) for box in _index_boxes(data)
    ):
        kind = table[0][:4]
        at = table.end()
        first, second = (
            int.from_bytes(data[at + skip : at + skip + 4], "big") for skip in (4, 8)
        )
        if kind == b"cmov":
            raise TooExpensiveError(
                "the index of the video is compressed, so its size is unknown"
            )
        # the number of samples in each chunk is the second of three numbers
        if kind == b"stsc":
            chunk_tables += 1
            entries = max(0, min(first, (len(data) - at - 8) // 12))
            most = (
                np.frombuffer(data, ">u4", 3 * entries, at + 8)[1::3].max(initial=0)
                if entries
                else 0
            )
            if (
                chunk_tables > MAX_STREAMS
                or first > MAX_SAMPLES
                or most > _MAX_SAMPLES_PER_BYTE * len(data)
            ):
                raise TooExpensiveError(
                    f"the video declares {first} groups of chunks of {most} samples"
                )
        elif kind == b"stsz" and first:
            # all samples have the same size, often in uncompressed audio
            sample_bytes += first * second
        else:
            samples += first if kind == b"trun" else second
    if samples > MAX_SAMPLES:
        raise TooExpensiveError(
            f"the video declares {samples} samples, more than the limit of"
            f" {MAX_SAMPLES}"
        )
    if sample_bytes > len(data):
        raise TooExpensiveError(
            f"the video declares samples of {sample_bytes} bytes, but has {len(data)}"
            " bytes"
        )


def _index_boxes(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the parts of an ISO media file that do not hold samples
    or texts.
    """
    pending = [(0, len(data))]
    # ISO/IEC 14496-12, 4.2
    for _ in range(_MAX_BOXES):
        if not pending:
            return
        offset, end = pending.pop()
        size = int.from_bytes(data[offset : offset + 4], "big")
        kind = data[offset + 4 : offset + 8]
        inner = offset + 8
        if size == 1:
            size = int.from_bytes(data[inner : inner + 8], "big")
            inner += 8
        is_text = 8 <= size <= end - offset and kind.startswith(_TEXTS)
        # 0: the last box, up to the end of the file; other sizes: FFmpeg may read the
        # bytes as boxes
        if size < 8:
            size = end - offset
        following = min(offset + size, end)
        if following < end:
            pending.append((following, end))
        # after the version
        if kind == b"meta" and data[inner + 8 : inner + 12] == b"hdlr":
            pending.append((inner + 4, following))
        elif kind in _CONTAINERS:
            pending.append((inner, following))
        elif kind != b"mdat" and not is_text:
            yield offset, following
    raise TooExpensiveError(f"the video has more than {_MAX_BOXES} boxes")
