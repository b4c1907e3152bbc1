"""The resize gives the bytes of Pillow, for both filters, up and down, on both axes."""

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
# edges of a crop, as shares of the sides
CROPS = st.tuples(*[st.floats(0, 1)] * 4)
WHOLE = (0, 0, 1, 1)
NEWER_PILLOW = int(PIL.__version__.split(".")[0]) >= 13


def noise(size, seed, levels):
    """Return an image of few levels: black beside white makes the filters overshoot."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.choice(levels, (*size[::-1], 3)).astype(np.uint8))


def by_two_passes(image, size, resampling):
    """Resize with Pillow, in the order of Pillow 13 with every version."""
    middle = (size[0], image.height)
    if image.height - size[1] > 2 * max(0, image.width - size[0]):
        middle = (image.width, size[1])
    return image.resize(middle, resampling).resize(size, resampling)


@settings(max_examples=60)
@given(old=SIDES, new=SIDES, crop=CROPS, resampling=FILTERS, seed=st.integers(0, 99))
# up and down, each axis alone, and both
@example((1, 1), (4000, 3), WHOLE, Image.Resampling.BICUBIC, 0)
@example((4000, 7), (1, 7), WHOLE, Image.Resampling.BILINEAR, 1)
@example((30, 4000), (30, 17), WHOLE, Image.Resampling.BICUBIC, 2)
@example((500, 375), (299, 224), WHOLE, Image.Resampling.BICUBIC, 3)
@example((224, 224), (224, 224), WHOLE, Image.Resampling.BICUBIC, 4)
def test_no_value_differs(old, new, crop, resampling, seed):
    """Also if only a crop of the new image is computed."""
    edges = np.array(crop) * (np.array(new * 2) - 1)
    left, top, right, bottom = map(int, edges)
    box = (left, top, max(left, right) + 1, max(top, bottom) + 1)
    image = noise(old, seed, [0, 128, 255])
    pixels = resize(image, new, box, resampling)[:, :, :3]
    expected = by_two_passes(image, new, resampling).crop(box)
    assert np.array_equal(pixels, np.asarray(expected))
    if NEWER_PILLOW:
        stock = image.resize(new, resampling).crop(box)
        assert np.array_equal(pixels, np.asarray(stock))


@pytest.mark.parametrize("size", [(3000, 2100), (700, 8200)])
def test_an_image_in_several_blocks_of_memory(size):
    """Pillow keeps more than 16 MiB in several blocks. The second image is resized in
    height first.
    """
    image = noise((60, 70), 0, list(range(256))).resize(size)
    pixels = resize(image, (64, 48), (0, 0, 64, 48), Image.Resampling.BICUBIC)
    expected = by_two_passes(image, (64, 48), Image.Resampling.BICUBIC)
    assert np.array_equal(pixels[:, :, :3], np.asarray(expected))
