"""Files that are no image, truncated or too large: each is refused with its reason,
whatever its bytes.
"""

import io
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from edje_index.images import decode_limits
from edje_index.images.decode import (
    REASONS,
    ImageError,
    decode_partial,
    decode_rgb,
    loading_truncated,
)
from tests.edje_index.image_cases import (
    LIMIT,
    encoded,
    gradient,
    in_little_memory,
    pixels,
    png,
    png_chunk,
    reason,
    tiff,
    with_chunk,
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


def bombs():
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
        ("JPEG", {"progressive": True}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "jpeg"}),
        ("MPO", {"save_all": True, "append_images": [Image.new("RGB", (24, 16))]}),
        *((kind, {}) for kind in ("JPEG", "PNG", "GIF", "BMP", "PPM", "AVIF", "QOI")),
        ("JPEG2000", {}),
    ]
] + [
    encoded(
        Image.fromarray(np.arange(384, dtype=np.uint16).reshape(16, 24) * 170), "TIFF"
    ),
    encoded(Image.fromarray(gradient()).quantize(8), "PNG", transparency=b"\0\x80"),
]


@given(st.data(), st.sampled_from(SEEDS))
@settings(max_examples=200)
def test_any_damage(data, seed):
    end = data.draw(st.integers(0, len(seed)))
    damaged = bytearray(seed[:end] if data.draw(st.booleans()) else seed)
    for _ in range(data.draw(st.integers(0, 6)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(
            st.integers(1, 255)
        )
    try:
        outcome = decode_rgb(bytes(damaged), LIMIT).mode
    except ImageError as error:
        outcome = error.reason
    assert outcome in ("RGB", *REASONS)


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


def jpeg_of_scans(scans, side=64):
    """A progressive JPEG whose last scan is repeated until there are `scans`."""
    jpeg = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    written = jpeg.count(b"\xff\xda")
    return jpeg[:last] + jpeg[last:-2] * (scans - written + 1) + b"\xff\xd9"


def bmp_of_runs(side):
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


def decoded_in_python(side):
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

    def load(self):
        raise AssertionError("the pixels were decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


@pytest.mark.usefixtures("no_pixels")
@pytest.mark.parametrize(
    ("data", "limit"),
    [
        (jpeg_of_scans(5000), LIMIT),
        # a WebP takes more memory than other images
        (encoded(Image.new("RGB", (100, 100)), "WEBP"), 10_000),
        (b"P3 1 1 255\n" + b"#\n" * 100_000 + b"1 2 3", LIMIT),
    ],
    ids=["scans", "WebP", "comments"],
)
def test_small_files_that_are_expensive(data, limit):
    assert reason(data, limit) == "too-expensive"


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


PIXELS = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
KINDS = {
    "baseline": encoded(Image.fromarray(PIXELS), "JPEG"),
    "progressive": encoded(Image.fromarray(PIXELS), "JPEG", progressive=True),
    "png": encoded(Image.fromarray(PIXELS), "PNG"),
}


def by_pillow(data):
    """Decode with the setting of the published code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(kept=st.floats(0.2, 0.95))
def test_the_loaded_part_is_that_of_the_published_code(kind, kept):
    data = KINDS[kind][: int(len(KINDS[kind]) * kept)]
    with pytest.raises(ImageError, match="truncated"):
        decode_rgb(data)
    decoded, truncation = decode_partial(data)
    assert truncation is not None
    assert truncation.startswith("truncated: ")
    np.testing.assert_array_equal(np.asarray(decoded), by_pillow(data))


def test_other_damage_is_not_loaded():
    data = bytearray(KINDS["png"])
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(ImageError, match="corrupt"):
        decode_partial(bytes(data))
    with pytest.raises(ImageError, match="empty"):
        decode_partial(b"")


def test_other_threads_still_refuse_truncated_files():
    data = KINDS["baseline"][:-500]
    with loading_truncated(), ThreadPoolExecutor(1) as pool:
        decode_rgb(data)
        with pytest.raises(ImageError, match="truncated"):
            pool.submit(decode_rgb, data).result()
    with pytest.raises(ImageError, match="truncated"):
        decode_rgb(data)
