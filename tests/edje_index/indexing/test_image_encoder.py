"""The encoder of an indexing worker."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.errors import ModelError
from edje_index.indexing.image_encoder import ImageEncoder, image_tokens
from tests.edje_index.towers import random_pixels


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)]
)
def test_an_opened_encoder_equals_the_bundle_up_to_rounding(
    tiny_bundle, tiny_model, dtype, tolerance
):
    pixels = random_pixels(tiny_model.clip_config, count=3)
    encoder = ImageEncoder.open(tiny_bundle, device="cpu", dtype=dtype)
    tokens, embeddings = encoder.encode(pixels)
    assert (tokens.dtype, embeddings.dtype) == (ml_dtypes.bfloat16, np.float32)
    assert (tokens.shape, embeddings.shape) == (
        (3, *encoder.block_shape),
        (3, encoder.embed_dim),
    )
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-6)
    expected, pooled = image_tokens(tiny_model.vision, tiny_model.adapter, pixels)
    np.testing.assert_allclose(embeddings, pooled.numpy(), atol=tolerance)
    np.testing.assert_allclose(
        tokens.astype(np.float32), expected.numpy(), rtol=2**-7, atol=3 * tolerance
    )


def test_refuses_unknown_devices_and_types(tiny_bundle):
    for options, words in (
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"device": "cuda:99"}, "no device cuda:99"),
        ({"dtype": "int8"}, "unknown data type 'int8'"),
    ):
        with pytest.raises(ModelError, match=words):
            ImageEncoder.open(tiny_bundle, **options)


def test_the_patches_of_all_frames_of_a_clip_are_those_of_one_image(
    tiny_bundle, tiny_model
):
    encoder = ImageEncoder.open(tiny_bundle, device="cpu")
    frames = random_pixels(tiny_model.clip_config, count=6)
    tokens, embeddings = encoder.encode(frames.unflatten(0, (2, 3)))
    patches, pooled = tiny_model.vision.encode(frames)
    expected = tiny_model.adapter(patches.reshape(2, -1, patches.shape[2])).detach()
    np.testing.assert_allclose(
        tokens.astype(np.float32), expected, rtol=2**-7, atol=1e-4
    )
    totals = pooled.unflatten(0, (2, 3)).sum(dim=1)
    units = torch.nn.functional.normalize(totals)
    np.testing.assert_allclose(embeddings, units, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["compressed", "clustered", "pruned"])
@torch.inference_mode()
def test_a_tower_and_an_adapter_in_bfloat16_give_similar_tokens(tmp_path, kind):
    """As on a GPU."""
    create_untrained_bundle(tmp_path / "model", sizes=replace(TINY, adapter_kind=kind))
    model = ModelBundle.load(tmp_path / "model")
    pixels = random_pixels(model.clip_config, count=3)
    expected, pooled = image_tokens(model.vision, model.adapter, pixels)
    low = torch.bfloat16
    tokens, embeddings = image_tokens(
        model.vision.to(low), model.adapter.to(low), pixels.to(low)
    )
    assert tokens.dtype == low
    similar = torch.nn.functional.cosine_similarity(tokens.float(), expected, dim=2)
    # rounding may move a patch to another cluster
    assert similar.median() > 0.999
    np.testing.assert_allclose(embeddings, pooled, atol=0.02)
