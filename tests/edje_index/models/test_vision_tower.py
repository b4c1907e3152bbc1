"""Vision towers: one pass gives the features and the embedding that open_clip and
timm compute separately, also with the linear layers for inference.
"""

import functools

import pytest
import torch

from edje_index.errors import ModelError
from edje_index.models.linear import Linear, replace_linear_layers
from edje_index.models.vision_tower import vision_tower
from tests.edje_index.towers import clip_config, random_clip, random_pixels, timm_config

CONFIGS = {
    "clip": clip_config(),
    "siglip": timm_config("test_vit3", 64, embed_dim=96),
    "dino": timm_config(
        "vit_small_patch14_reg4_dinov2", 56, pool="token", embed_dim=384
    ),
}
TOLERANCE = 1e-5


@functools.cache
def opened(name):
    """The configuration of a model with random weights, the model, and the tower made
    from its image half.
    """
    config = CONFIGS[name]
    model = random_clip(config)
    return config, model, vision_tower(model.visual, config.embed_dim)


@pytest.mark.parametrize("name", ["clip", "siglip"])
@torch.inference_mode()
def test_embedding_is_encode_image(name):
    config, model, tower = opened(name)
    pixels = random_pixels(config)
    _, embedding = tower.encode(pixels)
    expected = model.encode_image(pixels, normalize=True)
    torch.testing.assert_close(embedding, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(embedding.norm(dim=1), torch.ones(2))
    assert embedding.shape[1] == tower.embed_dim == config.embed_dim


@torch.inference_mode()
def test_timm_patches_are_the_last_hidden_state_without_prefix():
    config, model, tower = opened("dino")
    pixels = random_pixels(config, count=1)
    patches, _ = tower.encode(pixels)
    trunk = model.visual.trunk
    last = len(trunk.blocks) - 1
    (expected,) = trunk.forward_intermediates(
        pixels, indices=[last], norm=True, output_fmt="NLC", intermediates_only=True
    )
    torch.testing.assert_close(patches, expected, atol=TOLERANCE, rtol=0)
    assert patches.shape == (1, tower.num_patches, tower.patch_dim)


@torch.inference_mode()
def test_clip_patches_are_the_input_of_the_last_layer_without_class_token():
    config, model, tower = opened("clip")
    seen = []
    last = model.visual.transformer.resblocks[-1]
    handle = last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    patches, _ = tower.encode(random_pixels(config))
    handle.remove()
    # one pass of the tower gives both
    (expected,) = seen
    torch.testing.assert_close(patches, expected[:, 1:], atol=0, rtol=0)
    assert patches.shape == (2, tower.num_patches, tower.patch_dim)


@pytest.mark.parametrize(("name", "heads"), [("clip", 2), ("siglip", 3)])
@torch.inference_mode()
def test_attention_is_that_of_the_last_layer(name, heads):
    """Compare with PyTorch's own multi-head attention, which can return its weights."""
    config, model, tower = opened(name)
    pixels = random_pixels(config)
    *outputs, received = tower.encode_with_attention(pixels)
    for left, right in zip(tower.encode(pixels), outputs, strict=True):
        torch.testing.assert_close(left, right, atol=TOLERANCE, rtol=0)
    weights = _last_layer_attention(model.visual, pixels, heads).mean(dim=(1, 2))
    assert tower.num_heads == heads
    expected = weights[:, -tower.num_patches :]
    torch.testing.assert_close(received, expected, atol=1e-6, rtol=0)


def _last_layer_attention(visual, pixels, heads):
    """Softmax weights [b, h, t, t] of the tower's last layer."""
    if hasattr(visual, "transformer"):
        last = visual.transformer.resblocks[-1]
        norm = last.ln_1
        weight, bias = last.attn.in_proj_weight, last.attn.in_proj_bias
    else:
        last = visual.trunk.blocks[-1]
        norm = last.norm1
        weight, bias = last.attn.qkv.weight, last.attn.qkv.bias
    seen = []
    handle = norm.register_forward_hook(lambda _, args, output: seen.append(output))
    visual(pixels)
    handle.remove()
    (x,) = seen
    reference = torch.nn.MultiheadAttention(x.shape[2], heads, batch_first=True)
    reference.in_proj_weight.copy_(weight)
    reference.in_proj_bias.copy_(bias)
    return reference(x, x, x, average_attn_weights=False)[1]


def test_towers_without_patch_tokens_are_refused():
    resnet = clip_config(layers=[1, 1, 1, 1], width=16, patch_size=None)
    with pytest.raises(ModelError, match="no patch features"):
        vision_tower(random_clip(resnet).visual, 24)
    convolutional = timm_config("resnet18", 64, pool="avg", embed_dim=512)
    with pytest.raises(ModelError, match="no patch features"):
        vision_tower(random_clip(convolutional).visual, 24)
    with pytest.raises(ModelError, match="need at least 2"):
        vision_tower(random_clip(clip_config(layers=1)).visual, 24)


# The tower of EVA uses the weights of its layers for products of its own.
TOWERS = [clip_config(), timm_config("eva02_tiny_patch14_224", 28)]


@pytest.mark.parametrize("has_operators", [True, False])
def test_linear_layers_equal_torchs_own(has_operators, monkeypatch):
    if not has_operators:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    rng = torch.Generator().manual_seed(5)
    weight, bias, x = (
        torch.randn(shape, generator=rng) for shape in ((7, 5), (7,), (3, 4, 5))
    )
    linear = Linear(weight, bias)
    assert (linear._product is not None) == has_operators
    assert torch.equal(linear.weight, weight)
    with torch.inference_mode():
        torch.testing.assert_close(
            linear(x[:, :2]), torch.nn.functional.linear(x[:, :2], weight, bias)
        )
        torch.testing.assert_close(linear(x), x @ weight.T + bias)


@pytest.mark.parametrize("config", TOWERS, ids=lambda config: config.name)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@torch.inference_mode()
def test_a_tower_gives_the_same_with_other_linear_layers(config, dtype, tolerance):
    tower = vision_tower(random_clip(config).visual, config.embed_dim)
    pixels = random_pixels(config)
    expected = tower.encode(pixels)
    replace_linear_layers(tower, dtype)
    assert any(isinstance(module, Linear) for module in tower.modules())
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        for left, right in zip(tower.encode(pixels), expected, strict=True):
            torch.testing.assert_close(
                left.float(), right, atol=tolerance, rtol=tolerance
            )
