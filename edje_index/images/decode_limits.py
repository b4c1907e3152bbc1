"""Limits on the cost of decoding. Without them, a small file could take gigabytes, or
keep a decoder busy for minutes.

Pillow and PyAV check most sizes themselves. For each limit in this module, there is a
crafted file whose decoding would otherwise take more than 5 seconds or 1 GB. The limits
count scans, reads and pixels, not seconds, so that a file fails on every machine or on
none.
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
"""Largest number of scans of a JPEG. Encoders write 1 to 18 scans. libtiff has the same
limit for the JPEGs inside a TIFF.
"""

MAX_FULL_SCANS = 20
"""Largest number of scans of a JPEG that has the largest allowed number of pixels. A
smaller JPEG may have more scans, because the time of a scan is proportional to the
number of pixels.
"""

MAX_READS = 2_500_000
"""Largest number of times that a decoder may read from a file. The limit is high,
because Pillow reads headers, and in a few formats also the pixels, in small steps.
"""

MAX_PYTHON_PIXELS = 1 << 21
"""Largest number of pixels of an image that Pillow decodes in Python (QOI, plain-text
PPM and others). Decoding takes about a microsecond per pixel.
"""

BYTES_PER_PIXEL = 12
"""Bytes of memory per pixel that are enough to decode an image. A progressive CMYK
JPEG takes 8 of them for its coefficients.
"""

# Bytes of memory per pixel to decode a WebP. Pillow decodes every WebP as an animation,
# for which it needs two canvases, two copies of the pixels, and the file.
_WEBP_BYTES_PER_PIXEL = 17

MAX_SAMPLES = 10_000_000
"""Largest number of samples (video frames and audio packets) in all streams of an MP4
together. Days of video or 60 hours of AAC audio have fewer samples.
"""

MAX_STREAMS = 64
"""Largest number of streams of a video."""

# Largest number of comments in a plain-text PPM. Pillow copies a megabyte for each
# comment.
_MAX_COMMENTS = 1000
# largest number of segments in a JPEG
_MAX_SEGMENTS = 100_000
# Markers that begin a segment of a JPEG. The length of the segment follows. The markers
# TEM and RST0 to RST7 are left out, because no length follows them.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
_START_OF_IMAGE = 0xD8
_END_OF_IMAGE = 0xD9
_START_OF_SCAN = 0xDA
# TIFF tags with the width and the height of a tile
_TIFF_TILE_SIZE = (322, 323)
# largest number of boxes in an ISO media file
_MAX_BOXES = 1_000_000
# Largest number of samples that a chunk may declare, per byte of the file. The old
# audio codecs of QuickTime pack up to 6 samples into a byte.
_MAX_SAMPLES_PER_BYTE = 8
# Names of the tables for which FFmpeg allocates memory. FFmpeg reads a table of any
# version, in boxes nested to any depth. The tables are therefore searched by name in
# all parts of the file but samples and texts.
_TABLE = re.compile(rb"stsz|stz2|stsc|trun|cmov.{4}dcomzlib", re.DOTALL)
# `_TEXTS` has the beginnings of the names of boxes with texts, and `_CONTAINERS` the
# names of the boxes that can contain boxes with texts. FFmpeg does not look for boxes
# inside a text.
_CONTAINERS = (b"moov", b"udta", b"ilst")
_TEXTS = (b"\xa9", b"desc", b"ldes", b"uuid")


class TooExpensiveError(Exception):
    """Decoding an input would take too long or too much memory. The message names
    the limit.
    """


class CountedReads(io.BytesIO):
    """A file in memory. After `MAX_READS` calls, its method `read` raises
    TooExpensiveError.
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

    Args:
        image: an image that Pillow has opened.
        data: content of the image file.
        max_pixels: largest allowed number of pixels of an image. The limits on the
            scans of a JPEG, the pixels of a WebP and the tiles of a TIFF follow from
            this number.

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
    # Pillow decodes whole tiles, and a tile may be larger than the image.
    if image.format == "TIFF":
        width, height = (image.tag_v2.get(tag, 1) for tag in _TIFF_TILE_SIZE)
        if width * height > max_pixels:
            raise TooExpensiveError(
                f"tile size {width} x {height} is over the limit of {max_pixels} pixels"
            )
    # `Image.DECODERS` lists the decoders that are written in Python.
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
    """Yield the offset of each scan header of a JPEG. Embedded thumbnails are not
    searched.
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
    """Check how many samples an ISO media file declares. FFmpeg allocates memory for
    each declared sample.

    Raises:
        TooExpensiveError: the file declares too many samples.
    """
    samples = sample_bytes = chunk_tables = 0
    for table in itertools.chain.from_iterable(
        _TABLE.finditer(data, *box) for box in _index_boxes(data)
    ):
        kind = table[0][:4]
        at = table.end()
        # the first two numbers of the table, which follow its version and flags
        first, second = (
            int.from_bytes(data[at + skip : at + skip + 4], "big") for skip in (4, 8)
        )
        if kind == b"cmov":
            raise TooExpensiveError(
                "the index of the video is compressed, so its size is unknown"
            )
        # The table "stsc" has `first` entries of three numbers each. The second number
        # of an entry is the number of samples in each chunk.
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
            # All samples have the size `first`. This is usual in uncompressed audio,
            # which can have a very large number of samples. Therefore the limit here
            # is on the bytes of the samples, and not on their number.
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
    """Yield (start, end) of the parts of an ISO media file that contain neither samples
    nor texts.
    """
    pending = [(0, len(data))]
    # ISO/IEC 14496-12, section 4.2, defines the header of a box.
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
        # Size 0 means that the box extends to the end of the file. Other sizes below 8
        # are invalid, but FFmpeg may read the following bytes as boxes. The box is
        # taken as long as possible in either case.
        if size < 8:
            size = end - offset
        following = min(offset + size, end)
        if following < end:
            pending.append((following, end))
        # The boxes inside this `meta` begin after 4 bytes with its version and flags.
        if kind == b"meta" and data[inner + 8 : inner + 12] == b"hdlr":
            pending.append((inner + 4, following))
        elif kind in _CONTAINERS:
            pending.append((inner, following))
        elif kind != b"mdat" and not is_text:
            yield offset, following
    raise TooExpensiveError(f"the video has more than {_MAX_BOXES} boxes")
