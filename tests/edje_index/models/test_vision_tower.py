"""Vision towers: one pass gives the features and the embedding that open_clip and
timm compute separately.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from edje_index.errors import ModelError
from edje_index.models.clip_config import ClipConfig
from edje_index.models.vision_tower import VisionTower, vision_tower
from tests.edje_index.towers import clip_config, random_clip, random_pixels, timm_config

CONFIGS = {
    "clip": clip_config(),
    "siglip": timm_config("test_vit3", 64, embed_dim=96),
    "dino": timm_config(
        "vit_small_patch14_reg4_dinov2", 56, pool="token", embed_dim=384
    ),
}
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """A model with random weights, and the tower made from its image half."""

    config: ClipConfig
    model: torch.nn.Module
    tower: VisionTower


@pytest.fixture(scope="module")
def case(request):
    config = CONFIGS[request.param]
    model = random_clip(config)
    return Case(config, model, vision_tower(model.visual, config.embed_dim))


def with_models(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", names, indirect=True)


@with_models("clip", "siglip")
@torch.inference_mode()
def test_embedding_is_encode_image(case):
    pixels = random_pixels(case.config)
    _, embedding = case.tower.encode(pixels)
    torch.testing.assert_close(
        embedding,
        case.model.encode_image(pixels, normalize=True),
        atol=TOLERANCE,
        rtol=0,
    )
    torch.testing.assert_close(embedding.norm(dim=1), torch.ones(2))
    assert embedding.shape[1] == case.tower.embed_dim == case.config.embed_dim


@with_models("dino")
@torch.inference_mode()
def test_timm_patches_are_the_last_hidden_state_without_prefix(case):
    trunk = case.model.visual.trunk
    pixels = random_pixels(case.config, count=1)
    patches, _ = case.tower.encode(pixels)
    last = len(trunk.blocks) - 1
    expected = trunk.forward_intermediates(
        pixels, indices=[last], norm=True, output_fmt="NLC", intermediates_only=True
    )[0]
    torch.testing.assert_close(patches, expected, atol=TOLERANCE, rtol=0)
    assert patches.shape == (1, case.tower.num_patches, case.tower.patch_dim)


@with_models("clip")
@torch.inference_mode()
def test_clip_patches_are_the_input_of_the_last_layer_without_class_token(
    case,
):
    seen: list[torch.Tensor] = []
    last = case.model.visual.transformer.resblocks[-1]
    handle = last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    pixels = random_pixels(case.config)
    patches, _ = case.tower.encode(pixels)
    handle.remove()
    assert len(seen) == 1, "one pass of the tower gives both"
    torch.testing.assert_close(patches, seen[0][:, 1:], atol=0, rtol=0)
    assert patches.shape == (2, case.tower.num_patches, case.tower.patch_dim)


@pytest.mark.parametrize(
    ("case", "heads"), [("clip", 2), ("siglip", 3)], indirect=["case"]
)
@torch.inference_mode()
def test_attention_is_that_of_the_last_layer(case, heads):
    """Compare with PyTorch's own multi-head attention, which can return its weights."""
    tower = case.tower
    pixels = random_pixels(case.config)
    patches, embedding, received = tower.encode_with_attention(pixels)
    for left, right in zip(tower.encode(pixels), (patches, embedding), strict=True):
        torch.testing.assert_close(left, right, atol=TOLERANCE, rtol=0)
    weights = _last_layer_attention(case.model, pixels, heads)
    assert tower.num_heads == heads
    torch.testing.assert_close(
        received, weights.mean(dim=(1, 2))[:, -tower.num_patches :], atol=1e-6, rtol=0
    )


def _last_layer_attention(
    model: torch.nn.Module, pixels: torch.Tensor, heads: int
) -> torch.Tensor:
    """Softmax weights [b, h, t, t] of the tower's last layer."""
    visual = model.visual
    is_clip = hasattr(visual, "transformer")
    layer = (visual.transformer.resblocks if is_clip else visual.trunk.blocks)[-1].attn
    norm = (
        visual.transformer.resblocks[-1].ln_1
        if is_clip
        else visual.trunk.blocks[-1].norm1
    )
    seen: list[torch.Tensor] = []
    handle = norm.register_forward_hook(lambda _, args, output: seen.append(output))
    visual(pixels)
    handle.remove()
    reference = torch.nn.MultiheadAttention(seen[0].shape[2], heads, batch_first=True)
    reference.in_proj_weight.copy_(
        layer.in_proj_weight if is_clip else layer.qkv.weight
    )
    reference.in_proj_bias.copy_(layer.in_proj_bias if is_clip else layer.qkv.bias)
    return reference(seen[0], seen[0], seen[0], average_attn_weights=False)[1]


def test_towers_without_patch_tokens_are_refused():
    resnet = clip_config(layers=[1, 1, 1, 1], width=16, patch_size=None)
    with pytest.raises(ModelError, match="no patch features"):
        vision_tower(random_clip(resnet).visual, 24)
    convolutional = timm_config("resnet18", 64, pool="avg", embed_dim=512)
    with pytest.raises(ModelError, match="no patch features"):
        vision_tower(random_clip(convolutional).visual, 24)
    with pytest.raises(ModelError, match="need at least 2"):
        vision_tower(random_clip(clip_config(layers=1)).visual, 24)
