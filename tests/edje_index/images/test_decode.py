"""Decoding of the image formats and modes that collections hold."""

import base64
import io
import struct
import zlib

import numpy as np
import pillow_heif
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, PngImagePlugin

from edje_index.images.decode import (
    HEAD_BYTES,
    ImageError,
    declared_pixels,
    decode_rgb,
    image_format,
)
from tests.edje_index.image_cases import (
    encoded,
    gradient,
    pixels,
    png,
    png_chunk,
    reason,
    tiff,
    with_chunk,
)

EXACT = {
    "JPEG": {"quality": 95, "subsampling": 0},
    "WEBP": {"lossless": True},
    "AVIF": {"quality": 100, "subsampling": "4:4:4"},
}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    kind = ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"][orientation % 5]
    upright = np.zeros((16, 32, 3), np.uint8)
    # with the shape, a white top-left quarter ...
    upright[:8, :16] = 255
    # ... and a grey one beside it identify all eight orientations
    upright[:8, 16:] = 96
    # EXIF 2.3, Orientation: what the 0th row and column of the stored array are
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(
        Image.fromarray(np.ascontiguousarray(stored)),
        kind,
        exif=exif,
        **EXACT.get(kind, {}),
    )
    found = pixels(data)
    assert found.shape == upright.shape
    assert np.abs(found.astype(int) - upright).max() <= 6


@given(
    st.sampled_from([b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08\0\x03", b""]),
    st.binary(max_size=200),
)
@settings(max_examples=60)
def test_no_exif_at_all_costs_the_image(start, tail):
    exif = b"Exif\0\0" + start + tail
    data = encoded(Image.fromarray(gradient()), "JPEG", exif=exif)
    assert pixels(data).shape == (16, 24, 3)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "YCbCr", "LAB", "CMYK"])
def test_opaque_modes(mode):
    white = {
        "LAB": (255, 128, 128),
        "YCbCr": (255, 128, 128),
        "RGB": (255,) * 3,
        "CMYK": (0,) * 4,
    }.get(mode, 255)
    flat = Image.new(mode, (12, 10), white)
    if mode == "P":
        flat.putpalette([0, 0, 0] * 255 + [255, 255, 255])
    assert np.abs(pixels(encoded(flat, "TIFF")).astype(int) - 255).max() <= 1


@pytest.mark.parametrize(
    ("transparency", "second"), [(0, [0, 255, 0]), (b"\0\x80\xff", [127, 255, 127])]
)
def test_palette_with_transparency_lies_on_white(transparency, second):
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    (found,) = pixels(encoded(image, "PNG", transparency=transparency)).tolist()
    assert found == [[255, 255, 255], second, [0, 0, 255]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "AVIF"])
def test_alpha_lies_on_white(kind):
    rgba = np.zeros((8, 16, 4), np.uint8)
    rgba[:, 8:] = (10, 20, 30, 255)
    found = pixels(encoded(Image.fromarray(rgba), kind, **EXACT.get(kind, {}))).astype(
        int
    )
    assert np.abs(found[:, :8] - 255).max() <= 3
    assert np.abs(found[:, 8:] - [10, 20, 30]).max() <= 3


SAMPLES = np.array([[0, 255, 256, 0x1234, 0x7FFF, 0x8000, 0xFFFF]], np.uint16)
HIGH_BYTES = [0, 0, 1, 0x12, 0x7F, 0x80, 0xFF]
COLOURS = b"\x12\x34" * 3 + b"\x56\x78" * 3


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (encoded(Image.fromarray(SAMPLES.astype("<u2")), "TIFF"), HIGH_BYTES),
        (encoded(Image.fromarray(SAMPLES.astype(">u2")), "TIFF"), HIGH_BYTES),
        (b"P5 7 1 65535\n" + SAMPLES.astype(">u2").tobytes(), HIGH_BYTES),
        # dark stays dark
        (b"P5 2 1 65535\n" + np.array([0x12, 0xFF], ">u2").tobytes(), [0, 0]),
        (
            tiff(4, 1, {258: (3, 1, 12), 262: (3, 1, 1)}, b"\x00\x08\x00\xff\xf0\x10"),
            [0, 0x80, 0xFF, 1],
        ),
        (
            tiff(
                3,
                1,
                {258: (3, 1, 16), 262: (3, 1, 0)},
                np.array([0, 0x7FFF, 0xFFFF], "<u2").tobytes(),
            ),
            [255, 128, 0],
        ),
        (png(2, 1, 16, 2, b"\0" + COLOURS), [0x12, 0x56]),
        (
            png(2, 1, 16, 2, b"\0" + COLOURS, png_chunk(b"tRNS", COLOURS[:6])),
            [255, 0x56],
        ),
        (
            png(2, 1, 16, 0, b"\0" + COLOURS[4:8], png_chunk(b"tRNS", COLOURS[:2])),
            [255, 0x56],
        ),
    ],
)
def test_16_bit_samples_keep_the_high_byte(data, expected):
    assert pixels(data)[0, :, 0].tolist() == expected


@pytest.mark.parametrize(
    ("samples", "kind", "expected"),
    [
        # fractions of white
        ([0.0, 0.5, 1.0], "f4", [0, 128, 255]),
        # dim stays dim
        ([0.1, 0.2], "f4", [26, 51]),
        ([0, 1000, 4000], "f4", [0, 64, 255]),
        ([np.nan, np.inf, -np.inf, 1.0], "f4", [0, 255, 0, 255]),
        ([np.nan, np.nan], "f4", [0, 0]),
        ([-3e38, 0, 3e38], "f4", [0, 128, 255]),
        ([1e-40, 0.0], "f4", [0, 0]),
        ([0, 128, 255], "i4", [0, 128, 255]),
        ([0, 0x8000, 0xFFFF], "i4", [0, 0x80, 0xFF]),
        ([-100, 0, 100], "i4", [0, 128, 255]),
    ],
)
def test_wide_samples(samples, kind, expected):
    image = Image.fromarray(np.array([samples], kind))
    found = pixels(encoded(image, "TIFF"))[0, :, 2]
    assert found.astype(int) == pytest.approx(expected, abs=1)


def test_huge_texts_and_profiles_do_not_cost_the_image():
    image = Image.fromarray(gradient())
    profile = b"x\0\0" + zlib.compress(bytes(5 << 20))
    files = [with_chunk(encoded(image, "PNG"), b"iCCP", profile)]
    for packed in (False, True):
        text = PngImagePlugin.PngInfo()
        text.add_text("comment", "x" * (5 << 20), zip=packed)
        files.append(encoded(image, "PNG", pnginfo=text))
    for data in files:
        assert (pixels(data) == gradient()).all()


@settings(max_examples=60)
@given(
    size=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    mode=st.sampled_from(["RGB", "L", "CMYK"]),
    quality=st.integers(1, 100),
    sampling=st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    progressive=st.booleans(),
    restarts=st.sampled_from([{}, {"restart_marker_rows": 1}]),
)
def test_a_jpeg_has_the_pixels_of_pillow(
    size, mode, quality, sampling, progressive, restarts
):
    colours = np.random.default_rng(0).integers(0, 255, (6, 9, 3), dtype=np.uint8)
    image = Image.fromarray(colours).resize(size).convert(mode)
    data = encoded(
        image,
        "JPEG",
        quality=quality,
        subsampling=sampling if mode == "RGB" else -1,
        progressive=progressive,
        **restarts,
    )
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(pixels(data), expected)


@settings(max_examples=100)
@given(
    at=st.floats(0, 1, exclude_max=True),
    value=st.integers(0, 255),
    length=st.floats(0.1, 1),
)
def test_a_damaged_jpeg_has_the_result_of_pillow(at, value, length):
    data = bytearray(encoded(Image.fromarray(gradient(60, 40)), "JPEG"))
    data[int(at * len(data))] = value
    damaged = bytes(data[: int(length * len(data))])
    try:
        expected = np.asarray(Image.open(io.BytesIO(damaged)).convert("RGB"))
    except Exception:  # Pillow raises any
        with pytest.raises(ImageError):
            pixels(damaged)
        return
    np.testing.assert_array_equal(pixels(damaged), expected)


def test_a_screenshot_of_windows_whose_alpha_is_zero_is_opaque():
    """A bitmap with a mask for alpha, version 5."""
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII", 124, 1, -1, 1, 32, 3, 0, 0, 0, 0, 0) + masks
    header += bytes(124 - len(header))
    pixel = bytes([30, 20, 10, 0])
    start = 14 + len(header)
    data = b"BM" + struct.pack("<IHHI", start + 4, 0, 0, start) + header + pixel
    assert decode_rgb(data).getpixel((0, 0)) == (10, 20, 30)


# A TIFF of one pixel, whose three planes have 16 bits.
PLANES = (
    "SUkqAA4AAAAAAQACAAQKAAABBAABAAAAAQAAAAEBBAABAAAAAQAAAAIBAwADAAAAjAAAAAMB"
    "AwABAAAAAQAAAAYBAwABAAAAAgAAABEBBAADAAAAkgAAABUBAwABAAAAAwAAABYBBAABAAAA"
    "AQAAABcBBAADAAAAngAAABwBAwABAAAAAgAAAAAAAAAQABAAEAAIAAAACgAAAAwAAAACAAAA"
    "AgAAAAIAAAA="
)


def test_planes_of_16_bits_are_refused():
    with pytest.raises(ImageError, match=r"unsupported-image: .*more than 8 bits"):
        decode_rgb(base64.b64decode(PLANES))


SIZE = (100, 60)


def photo():
    """A red half above a green and a blue quarter."""
    pixels = np.zeros((SIZE[1], SIZE[0], 3), np.uint8)
    pixels[:30, :, 0] = 255
    pixels[30:, :50, 1] = 255
    pixels[30:, 50:, 2] = 255
    return Image.fromarray(pixels)


def heic(image, **options):
    file = io.BytesIO()
    pillow_heif.from_pillow(image).save(file, quality=90, **options)
    return file.getvalue()


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_photo_is_upright_like_the_same_jpeg(orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    jpeg = encoded(photo(), "JPEG", exif=exif.tobytes(), quality=95, subsampling=0)
    expected = np.asarray(decode_rgb(jpeg), dtype=int)
    decoded = np.asarray(decode_rgb(heic(photo(), exif=exif.tobytes())), dtype=int)
    assert decoded.shape == expected.shape
    assert abs(decoded - expected).mean() < 2


def test_the_size_is_known_before_pixels_are_decoded():
    data = heic(photo())
    assert image_format(data[:HEAD_BYTES]) == "HEIF"
    assert declared_pixels(data) == SIZE[0] * SIZE[1]
    assert reason(data, 5_999) == "too-many-pixels"
    assert reason(data[:-5]) == "truncated"


def test_damaged_files_are_refused_or_decoded():
    data = heic(photo())
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(random.integers(1, 6)):
            damaged[random.integers(len(data))] = random.integers(256)
        try:
            assert decode_rgb(bytes(damaged)).mode == "RGB"
        except ImageError:
            refused += 1
    assert 25 < refused < 200
