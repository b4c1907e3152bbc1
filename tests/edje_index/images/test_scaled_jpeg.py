"""Decoding of JPEG images at a part of their size."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from edje_index.images.decode import decode_image, decode_partial, decode_rgb
from edje_index.images.decoded_input import DecodeSettings, decode_input
from tests.edje_index.image_cases import encoded

WIDTH, HEIGHT = 650, 480
X, Y = np.meshgrid(np.linspace(0, 1, WIDTH), np.linspace(0, 1, HEIGHT))
SMOOTH = Image.fromarray((255 * np.stack([X, Y, 1 - X * Y], axis=-1)).astype(np.uint8))


def photo(orientation: int = 1, kind: str = "JPEG", **options: object) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(SMOOTH, kind, exif=exif, **options)


@pytest.mark.parametrize(
    ("least_side", "size"),
    [
        (481, (650, 480)),
        (241, (650, 480)),
        (240, (325, 240)),
        (121, (325, 240)),
        (120, (163, 120)),
        (60, (82, 60)),
        (1, (82, 60)),
    ],
)
@pytest.mark.parametrize("progressive", [False, True])
def test_both_sides_keep_the_least_number_of_pixels(least_side, size, progressive):
    data = photo(progressive=progressive, quality=95)
    decoded = decode_image(data, least_side=least_side)
    assert (decoded.image.size, decoded.size) == (size, (WIDTH, HEIGHT))
    shrunk = decode_rgb(data).resize(size, Image.Resampling.BOX)
    difference = np.abs(np.asarray(decoded.image, int) - np.asarray(shrunk, int))
    assert difference.mean() < 2.5
    if size == (WIDTH, HEIGHT):
        assert difference.max() == 0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_in_the_file_is_that_of_the_upright_image(orientation):
    data = photo(orientation)
    decoded = decode_image(data, least_side=120)
    assert decoded.size == decode_image(data).size == decode_rgb(data).size
    assert decoded.image.size == ((120, 163) if orientation > 4 else (163, 120))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "GIF"])
def test_other_formats_are_decoded_whole(kind):
    data = encoded(SMOOTH, kind)
    decoded = decode_image(data, least_side=10)
    assert decoded.size == (WIDTH, HEIGHT)
    assert decoded.image.tobytes() == decode_rgb(data).tobytes()


def test_grey_and_cmyk_photos_are_scaled_too():
    for mode in ("L", "CMYK"):
        data = encoded(SMOOTH.convert(mode), "JPEG")
        decoded = decode_image(data, least_side=120)
        shrunk = decode_rgb(data).resize((163, 120), Image.Resampling.BOX)
        assert decoded.image.mode == "RGB"
        assert np.abs(np.asarray(decoded.image, int) - np.asarray(shrunk, int)).mean() < 2.5


def test_the_limit_on_pixels_is_that_of_the_file():
    settings = DecodeSettings(max_pixels=WIDTH * HEIGHT - 1, least_side=60)
    with pytest.raises(Exception, match="over the limit"):
        decode_input(photo(), "photo.jpg", settings, np.asarray)


def test_the_readable_part_of_a_truncated_photo_is_scaled():
    data = photo()
    whole = decode_image(data, least_side=120).image
    decoded, truncation = decode_partial(data[: len(data) // 2], least_side=120)
    assert truncation is not None
    assert (decoded.image.size, decoded.size) == ((163, 120), (WIDTH, HEIGHT))
    np.testing.assert_array_equal(np.asarray(decoded.image)[:40], np.asarray(whole)[:40])


def test_an_input_has_the_size_of_the_file_and_the_pixels_of_the_scaled_image():
    decoded = decode_input(photo(6), "photo.jpg", DecodeSettings(least_side=120), lambda image: image)
    assert (decoded.size, decoded.pixels.size) == ((HEIGHT, WIDTH), (120, 163))
