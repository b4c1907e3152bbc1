"""Preprocessing is open_clip's evaluation transform, bit for bit."""

import numpy as np
import PIL
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edje_index.images.decode import ImageError
from edje_index.images.preprocessing import Preprocessor, normalize
from edje_index.models.clip_config import ClipConfig
from tests.edje_index.towers import eval_transform

MODES = [
    {"size": [32, 32], "resize_mode": "shortest", "interpolation": "bicubic"},
    {
        "size": 48,
        "resize_mode": "squash",
        "interpolation": "bilinear",
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    },
    {"size": [24, 40], "resize_mode": "squash"},
    {"size": [24, 40], "resize_mode": "shortest", "interpolation": "bilinear"},
    {"size": [32, 32], "resize_mode": "longest", "fill_color": 9},
]


def noise(width, height, seed=0):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


# before Pillow 13, images are always resized in width first
@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="needs Pillow 13")
@pytest.mark.parametrize(
    "mode", MODES, ids=lambda mode: f"{mode['resize_mode']}-{mode['size']}"
)
@settings(max_examples=25)
@given(size=st.tuples(st.integers(3, 90), st.integers(3, 90)), seed=st.integers(0, 99))
def test_equals_open_clip(mode, size, seed):
    config = ClipConfig("any", {}, mode)
    image = noise(*size, seed)
    preprocess = Preprocessor(config)
    pixels = preprocess(image)
    assert pixels.dtype == torch.uint8
    expected = eval_transform(config)(image)
    assert torch.equal(normalize(pixels, preprocess.scale), expected)


def test_an_image_too_narrow_to_resize_is_an_image_error():
    preprocess = Preprocessor(
        ClipConfig("any", {}, {"size": [32, 32], "resize_mode": "longest"})
    )
    with pytest.raises(ImageError, match="1 x 200 pixels"):
        preprocess(noise(1, 200))
