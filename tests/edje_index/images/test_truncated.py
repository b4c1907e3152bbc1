"""Truncated files: Pillow's own LOAD_TRUNCATED_IMAGES is the oracle of what is
loaded.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from edje_index.images.decode import (
    ImageError,
    decode_partial,
    decode_rgb,
    loading_truncated,
)
from tests.edje_index.image_cases import encoded

PIXELS = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
KINDS = {
    "baseline": encoded(Image.fromarray(PIXELS), "JPEG"),
    "progressive": encoded(Image.fromarray(PIXELS), "JPEG", progressive=True),
    "png": encoded(Image.fromarray(PIXELS), "PNG"),
}


def by_pillow(data: bytes) -> np.ndarray:
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
