"""Files that are no image, truncated or too large: each is refused with its reason,
whatever its bytes.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edje_index.images.decode import REASONS, ImageError, decode_rgb
from tests.edje_index.image_cases import (
    LIMIT,
    encoded,
    gradient,
    in_little_memory,
    pixels,
    png,
    reason,
    tiff,
)


def test_nothing_and_other_things():
    assert reason(b"") == "empty"
    assert reason(b"\0") == "not-an-image"
    assert reason(b"<html>no photo here</html>") == "not-an-image"
    assert reason(b"PK\x03\x04" + bytes(100)) == "not-an-image"
    assert reason(b"\0\0\0\x18ftypcrx \0\0\0\0crx isom") == "unsupported-image"
    assert reason(b"\xff\x0a" + bytes(40)) == "unsupported-image"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP"])
def test_cut_pixels_are_called_truncated(kind):
    noise = Image.fromarray(
        np.random.default_rng(3).integers(0, 256, (40, 40, 3), np.uint8)
    )
    data = encoded(noise, kind)
    assert reason(data[: len(data) // 2]) == "truncated"


def bombs() -> dict[str, bytes]:
    """Small files that declare (or unpack to) 40,000 x 40,000 pixels, or the
    maximum of the format.
    """
    side = 40_000
    jpeg = encoded(Image.new("L", (8, 8)), "JPEG")
    frame = jpeg.index(b"\xff\xc0") + 5
    tile = {322: (4, 1, side), 323: (4, 1, side), 324: (4, 1, 8), 325: (4, 1, 8)}
    return {
        "PNG": png(side, side, 1, 0, bytes(4096)),
        "JPEG": jpeg[:frame] + struct.pack(">HH", side, side) + jpeg[frame + 4 :],
        "GIF screen": (
            b"GIF89a"
            + struct.pack("<HHBBB", side, side, 0, 0, 0)
            + b",\0\0\0\0\1\0\1\0\0\2\2D\1\0;"
        ),
        "GIF frame": (
            b"GIF89a\1\0\1\0\0\0\0!\xf9\4\x08\0\0\0\0,"
            + struct.pack("<HHHHB", 0, 0, 13_000, 13_000, 0)
            + b"\2\2D\1\0;"
        ),
        "WEBP": (
            b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0"
            + (16_382).to_bytes(3, "little") * 2
        ),
        "BMP": (
            b"BM"
            + struct.pack(
                "<IIIIiiHHIIIIII", 0, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0
            )
        ),
        "TIFF": tiff(side, side, {258: (3, 1, 8), 262: (3, 1, 1)}, b"\0" * 8),
        "TIFF tile": tiff(
            8,
            8,
            {258: (3, 1, 8), 259: (3, 1, 8), 262: (3, 1, 1), **tile},
            zlib.compress(bytes(64)),
        ),
        "PPM": b"P6 40000 40000 255\n",
        "QOI": b"qoif" + struct.pack(">IIBB", side, side, 3, 0),
        "JPEG2000": (
            encoded(Image.new("L", (8, 8)), "JPEG2000", no_jp2=True).replace(
                struct.pack(">IIIIIIII", 8, 8, 0, 0, 8, 8, 0, 0),
                struct.pack(">IIIIIIII", side, side, 0, 0, side, side, 0, 0),
            )
        ),
    }


def test_large_files_in_little_memory(tmp_path):
    """Bombs allocate nothing, wide samples take 16 bytes each, and too little
    memory is no damage of a photo.
    """
    samples = np.zeros((4000, 4000), np.float32)
    samples[1, 1] = 1
    samples[3999, 3999] = -1
    wide = encoded(Image.fromarray(samples), "TIFF", compression="tiff_adobe_deflate")
    *refused, size = in_little_memory(tmp_path, [*bombs().values(), wide], 244)
    assert size == "(4000, 4000)"
    assert set(refused) <= {"too-many-pixels", "too-expensive"}
    (tmp_path / "photo").mkdir()
    # libjpeg calls it a broken stream
    photo = encoded(Image.new("RGB", (6000, 4000)), "JPEG", progressive=True)
    outcomes = in_little_memory(tmp_path / "photo", [photo], 4, 96, 256)
    assert set(outcomes) == {"MemoryError", "(6000, 4000)"}


def test_limit_is_exact():
    data = encoded(Image.new("RGB", (10, 10)), "PNG")
    assert pixels(data, 100).shape == (10, 10, 3)
    assert reason(data, 99) == "too-many-pixels"


# Any bytes at all

SEEDS = [
    encoded(Image.fromarray(gradient()), kind, **options)
    for kind, options in [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("GIF", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "jpeg"}),
        ("PPM", {}),
        ("JPEG2000", {}),
        ("AVIF", {}),
        ("QOI", {}),
        ("MPO", {"save_all": True, "append_images": [Image.new("RGB", (24, 16))]}),
    ]
] + [
    encoded(
        Image.fromarray(np.arange(384, dtype=np.uint16).reshape(16, 24) * 170), "TIFF"
    ),
    encoded(Image.fromarray(gradient()).quantize(8), "PNG", transparency=b"\0\x80"),
]


def image_or_reason(data: bytes) -> None:
    """Any exception but `ImageError` fails the test."""
    try:
        outcome = decode_rgb(data, LIMIT).mode
    except ImageError as error:
        outcome = error.reason
    assert outcome in ("RGB", *REASONS)


@given(st.data(), st.sampled_from(SEEDS))
@settings(max_examples=200)
def test_any_damage(data, seed):
    end = data.draw(st.integers(0, len(seed)))
    damaged = bytearray(seed[:end] if data.draw(st.booleans()) else seed)
    for _ in range(data.draw(st.integers(0, 6)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(
            st.integers(1, 255)
        )
    image_or_reason(bytes(damaged))


QUIET = """
import logging, sys, threading, warnings
from io import BytesIO
from PIL import Image
from edje_index.images.decode import decode_rgb

def outside():
    for data in files:
        try:
            Image.open(BytesIO(data)).load()
        except Exception:
            pass

files = [bytes.fromhex(line) for line in sys.stdin]
filters = list(warnings.filters)
for data in files:
    try:
        decode_rgb(data)
    except Exception as error:
        assert not isinstance(error, Warning)
assert warnings.filters == filters and not logging.getLogger("PIL").level
print("outside", file=sys.stderr, flush=True)
outside()
"""


def test_damage_is_reported_by_its_exception_only():
    """And what Pillow and libtiff report elsewhere in the process stays."""
    lzw = bytearray(
        encoded(Image.fromarray(gradient(64, 64)), "TIFF", compression="tiff_lzw")
    )
    lzw[200:260] = b"\xff" * 60
    photo = encoded(Image.fromarray(gradient()), "TIFF")
    tag = photo.index(struct.pack("<HHL", 277, 3, 1))
    many = photo[:tag] + struct.pack("<HHLH", 277, 3, 1, 300) + photo[tag + 10 :]
    two = photo[:tag] + struct.pack("<HHL", 277, 3, 2) + photo[tag + 8 :]
    done = subprocess.run(
        [sys.executable, "-c", QUIET],
        input="\n".join(bytes(each).hex() for each in (lzw, many, two)),
        text=True,
        capture_output=True,
        check=True,
    )
    quiet, reports = done.stderr.split("outside")
    assert quiet == ""
    for report in (
        "Using code not yet in table",
        "More samples per pixel",
        "UserWarning",
    ):
        assert report in reports
