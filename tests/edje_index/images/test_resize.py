"""The resize gives the bytes of Pillow, for both filters, up and down, on both axes."""

from __future__ import annotations

import numpy as np
import PIL
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from edje_index.images.resize import SUPPORT, resize

FILTERS = st.sampled_from(list(SUPPORT))
# at most 2 million pixels, with sides from 1 to 4000
SIDES = st.one_of(
    st.tuples(st.integers(1, 500), st.integers(1, 4000)),
    st.tuples(st.integers(1, 4000), st.integers(1, 500)),
)
NEWER_PILLOW = int(PIL.__version__.split(".")[0]) >= 13


def noise(size: tuple[int, int], seed: int, levels: list[int]) -> Image.Image:
    """Return an image of few levels: black beside white makes the filters overshoot."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.choice(levels, (*size[::-1], 3)).astype(np.uint8))


def by_two_passes(
    image: Image.Image, size: tuple[int, int], resampling: Image.Resampling
) -> Image.Image:
    """Resize with Pillow, in the order of Pillow 13 with every version."""
    middle = (size[0], image.height)
    if image.height - size[1] > 2 * max(0, image.width - size[0]):
        middle = (image.width, size[1])
    return image.resize(middle, resampling).resize(size, resampling)


@settings(max_examples=60)
@given(old=SIDES, new=SIDES, resampling=FILTERS, seed=st.integers(0, 99))
# up and down, each axis alone, and both
@example(old=(1, 1), new=(4000, 3), resampling=Image.Resampling.BICUBIC, seed=0)
@example(old=(4000, 7), new=(1, 7), resampling=Image.Resampling.BILINEAR, seed=1)
@example(old=(30, 4000), new=(30, 17), resampling=Image.Resampling.BICUBIC, seed=2)
@example(old=(500, 375), new=(299, 224), resampling=Image.Resampling.BICUBIC, seed=3)
@example(old=(224, 224), new=(224, 224), resampling=Image.Resampling.BICUBIC, seed=4)
def test_no_value_differs(old, new, resampling, seed):
    image = noise(old, seed, [0, 128, 255])
    pixels = resize(image, new, (0, 0, *new), resampling)[:, :, :3]
    assert np.array_equal(pixels, np.asarray(by_two_passes(image, new, resampling)))
    if NEWER_PILLOW:
        assert np.array_equal(pixels, np.asarray(image.resize(new, resampling)))


@settings(max_examples=40)
@given(data=st.data(), resampling=FILTERS)
def test_only_the_crop_is_computed(data, resampling):
    sides = st.integers(1, 90)
    old = data.draw(st.tuples(sides, sides))
    new = data.draw(st.tuples(sides, sides))
    left = data.draw(st.integers(0, new[0] - 1))
    top = data.draw(st.integers(0, new[1] - 1))
    right = data.draw(st.integers(left + 1, new[0]))
    bottom = data.draw(st.integers(top + 1, new[1]))
    image = noise(old, 0, list(range(256)))
    pixels = resize(image, new, (left, top, right, bottom), resampling)[:, :, :3]
    expected = by_two_passes(image, new, resampling).crop((left, top, right, bottom))
    assert np.array_equal(pixels, np.asarray(expected))


@pytest.mark.parametrize("size", [(3000, 2100), (700, 8200)])
def test_an_image_in_several_blocks_of_memory(size):
    """Pillow keeps more than 16 MiB in several blocks. The second image is resized in
    height first.
    """
    image = noise((60, 70), 0, list(range(256))).resize(size)
    pixels = resize(image, (64, 48), (0, 0, 64, 48), Image.Resampling.BICUBIC)
    expected = by_two_passes(image, (64, 48), Image.Resampling.BICUBIC)
    assert np.array_equal(pixels[:, :, :3], np.asarray(expected))
