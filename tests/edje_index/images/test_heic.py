"""HEIC photos, as phones write them. The encoder is that of pillow-heif."""

from __future__ import annotations

import io

import numpy as np
import pillow_heif
import pytest
from PIL import ExifTags, Image

from edje_index.images.decode import (
    HEAD_BYTES,
    ImageError,
    declared_pixels,
    decode_rgb,
    image_format,
)

SIZE = (100, 60)


def photo() -> Image.Image:
    """A red half above a green and a blue quarter."""
    pixels = np.zeros((SIZE[1], SIZE[0], 3), np.uint8)
    pixels[:30, :, 0] = 255
    pixels[30:, :50, 1] = 255
    pixels[30:, 50:, 2] = 255
    return Image.fromarray(pixels)


def heic(image: Image.Image, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = io.BytesIO()
    pillow_heif.from_pillow(image).save(file, exif=exif.tobytes(), quality=90)
    return file.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_upright_like_the_same_jpeg(orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = io.BytesIO()
    photo().save(file, "JPEG", exif=exif.tobytes(), quality=95, subsampling=0)
    expected = np.asarray(decode_rgb(file.getvalue()), dtype=int)
    decoded = np.asarray(decode_rgb(heic(photo(), orientation)), dtype=int)
    assert decoded.shape == expected.shape
    assert abs(decoded - expected).mean() < 2


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_every_mode_becomes_rgb(mode):
    decoded = decode_rgb(heic(Image.new(mode, (64, 48))))
    assert (decoded.mode, decoded.size) == ("RGB", (64, 48))


def test_the_size_is_known_before_pixels_are_decoded():
    data = heic(photo())
    assert image_format(data[:HEAD_BYTES]) == "HEIF"
    assert declared_pixels(data) == SIZE[0] * SIZE[1]
    with pytest.raises(ImageError) as caught:
        decode_rgb(data, max_pixels=5_999)
    assert caught.value.reason == "too-many-pixels"


def test_a_file_that_ends_early_is_truncated():
    data = heic(photo())
    with pytest.raises(ImageError) as caught:
        decode_rgb(data[: len(data) - 5])
    assert caught.value.reason == "truncated"


def test_damaged_files_are_refused_or_decoded():
    data = heic(photo())
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(random.integers(1, 6)):
            damaged[random.integers(len(data))] = random.integers(256)
        try:
            assert decode_rgb(bytes(damaged)).mode == "RGB"
        except ImageError:
            refused += 1
    assert 50 < refused < 400
