"""Small files that would occupy a decoder for long, or take much memory: refused
before their pixels are decoded.
"""

from __future__ import annotations

import struct

import pytest
from PIL import Image, ImageFile

from edje_index.images import decode_limits
from tests.edje_index.image_cases import (
    encoded,
    gradient,
    pixels,
    png_chunk,
    reason,
    with_chunk,
)


def jpeg_of_scans(scans: int, side: int = 64) -> bytes:
    """A progressive JPEG whose last scan is repeated until there are `scans`."""
    jpeg = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    written = jpeg.count(b"\xff\xda")
    return jpeg[:last] + jpeg[last:-2] * (scans - written + 1) + b"\xff\xd9"


def bmp_of_runs(side: int) -> bytes:
    """A run-length encoded BMP of one colour."""
    runs = (
        b"\xff\1" * (side // 255) + bytes([side % 255, 1]) + b"\0\0"
    ) * side + b"\0\1"
    header = struct.pack(
        "<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(runs), 0, 0, 256, 0
    )
    return (
        b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + header + bytes(1024) + runs
    )


def decoded_in_python(side: int) -> dict[str, bytes]:
    """Files of `side` x `side` pixels in the formats that Pillow decodes in Python."""
    size = b"%d %d" % (side, side)
    return {
        "QOI": encoded(Image.new("RGB", (side, side)), "QOI"),
        "plain PPM": b"P3 %s 255\n" % size + b"0 " * (3 * side * side),
        "plain PGM": b"P2 %s 255\n" % size + b"0 " * (side * side),
        "plain PBM": b"P1 %s\n" % size + b"0" * (side * side),
        "PPM of 200 levels": b"P6 %s 200\n" % size + bytes(3 * side * side),
        "BMP of runs": bmp_of_runs(side),
    }


@pytest.fixture
def no_pixels(monkeypatch):
    """Decoding the pixels of any image fails the test."""

    def load(self: ImageFile.ImageFile) -> None:
        raise AssertionError("the pixels were decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


@pytest.mark.usefixtures("no_pixels")
def test_thousands_of_scans():
    assert reason(jpeg_of_scans(5000)) == "too-expensive"


def test_large_images_may_have_fewer_scans():
    at_limit, over_limit = (
        jpeg_of_scans(decode_limits.MAX_FULL_SCANS + more, side=100) for more in (0, 1)
    )
    assert pixels(at_limit, limit=10_000).shape == (100, 100, 3)
    assert reason(over_limit, limit=10_000) == "too-expensive"


def test_scans_of_a_thumbnail_do_not_count():
    thumbnail = jpeg_of_scans(200)
    jpeg = encoded(Image.fromarray(gradient()), "JPEG")
    segment = b"\xff\xef" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    assert (pixels(jpeg[:2] + segment + jpeg[2:]) == pixels(jpeg)).all()


@pytest.mark.usefixtures("no_pixels")
@pytest.mark.parametrize("name", decoded_in_python(1))
def test_large_images_of_slow_decoders(name, monkeypatch):
    monkeypatch.setattr(decode_limits, "MAX_PYTHON_PIXELS", 300 * 300 - 1)
    assert reason(decoded_in_python(300)[name]) == "too-expensive"


@pytest.mark.usefixtures("no_pixels")
def test_a_webp_takes_more_memory_than_other_images():
    assert (
        reason(encoded(Image.new("RGB", (100, 100)), "WEBP"), limit=10_000)
        == "too-expensive"
    )


@pytest.mark.usefixtures("no_pixels")
def test_many_comments():
    assert reason(b"P3 1 1 255\n" + b"#\n" * 100_000 + b"1 2 3") == "too-expensive"


@pytest.mark.usefixtures("no_pixels")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
def test_endless_headers(kind, monkeypatch):
    monkeypatch.setattr(decode_limits, "MAX_READS", 10_000)
    data = encoded(Image.fromarray(gradient()), kind)
    empty_segments = {
        "PNG": (
            with_chunk(data, b"prIv", b"")[:33]
            + png_chunk(b"prIv", b"") * 10_000
            + data[33:]
        ),
        "JPEG": data[:2] + b"\xff\xef\0\2" * 10_000 + data[2:],
        "GIF": (
            (start := data[: 13 + 3 * (2 << (data[10] & 7))])
            + b"!\xfe\0" * 10_000
            + data[len(start) :]
        ),
    }
    assert reason(empty_segments[kind]) == "too-expensive"
