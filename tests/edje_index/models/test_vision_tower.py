"""Vision towers: one pass gives the features and the embedding that open_clip and timm compute separately."""

from __future__ import annotations

import pytest
import torch

from edje_index.errors import ModelError
from edje_index.models.clip_config import ClipConfig
from edje_index.models.clip_model import build_visual
from edje_index.models.vision_tower import VisionTower, vision_tower
from tests.edje_index.towers import clip_config, published_config, random_clip, random_pixels, timm_config

SIGLIP = timm_config("vit_tiny_patch16_224", 224)
DINO = timm_config("vit_small_patch14_reg4_dinov2", 518, pool="token", embed_dim=384)
SMALL = [clip_config(), SIGLIP]
REAL = [published_config("ViT-B-32"), published_config("ViT-B-16-SigLIP2")]
TOLERANCE = 1e-5


def ids(config: ClipConfig) -> str:
    return config.name


def tower_and_model(config: ClipConfig) -> tuple[VisionTower, torch.nn.Module]:
    model = random_clip(config)
    return vision_tower(model.visual), model


@pytest.mark.parametrize("config", [*SMALL, *REAL], ids=ids)
@torch.inference_mode()
def test_embedding_is_encode_image(config: ClipConfig) -> None:
    tower, model = tower_and_model(config)
    pixels = random_pixels(config)
    _, embedding = tower.encode(pixels)
    torch.testing.assert_close(embedding, model.encode_image(pixels, normalize=True), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(embedding.norm(dim=1), torch.ones(2))
    assert embedding.shape[1] == tower.embed_dim == config.embed_dim


@pytest.mark.parametrize("config", [SIGLIP, REAL[1], DINO], ids=ids)
@torch.inference_mode()
def test_timm_patches_are_the_last_hidden_state_without_prefix(config: ClipConfig) -> None:
    tower, model = tower_and_model(config)
    trunk = model.visual.trunk
    pixels = random_pixels(config, count=1)
    patches, _ = tower.encode(pixels)
    last = len(trunk.blocks) - 1
    expected = trunk.forward_intermediates(
        pixels, indices=[last], norm=True, output_fmt="NLC", intermediates_only=True
    )[0]
    torch.testing.assert_close(patches, expected, atol=TOLERANCE, rtol=0)
    assert patches.shape == (1, tower.num_patches, tower.patch_dim)


@pytest.mark.parametrize("config", [clip_config(), REAL[0]], ids=ids)
@torch.inference_mode()
def test_clip_patches_are_the_input_of_the_last_layer_without_class_token(config: ClipConfig) -> None:
    tower, model = tower_and_model(config)
    seen: list[torch.Tensor] = []
    last = model.visual.transformer.resblocks[-1]
    handle = last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    pixels = random_pixels(config)
    patches, _ = tower.encode(pixels)
    handle.remove()
    assert len(seen) == 1, "one pass of the tower gives both"
    torch.testing.assert_close(patches, seen[0][:, 1:], atol=0, rtol=0)
    assert patches.shape == (2, tower.num_patches, tower.patch_dim)


@pytest.mark.parametrize("config", SMALL, ids=ids)
@torch.inference_mode()
def test_image_tower_alone_is_the_same_as_in_the_whole_model(config: ClipConfig) -> None:
    whole, model = tower_and_model(config)
    visual = build_visual(config)
    visual.load_state_dict(model.visual.state_dict(), strict=True)
    alone = vision_tower(visual)
    pixels = random_pixels(config)
    for left, right in zip(whole.encode(pixels), alone.encode(pixels), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("config", "heads"), [(clip_config(), 2), (SIGLIP, 3)], ids=["clip", "siglip"])
@torch.inference_mode()
def test_attention_is_that_of_the_last_layer(config: ClipConfig, heads: int) -> None:
    """Compare with PyTorch's own multi-head attention, which can return its weights."""
    tower, model = tower_and_model(config)
    pixels = random_pixels(config)
    patches, embedding, received = tower.encode_with_attention(pixels)
    for left, right in zip(tower.encode(pixels), (patches, embedding), strict=True):
        torch.testing.assert_close(left, right, atol=TOLERANCE, rtol=0)
    weights = _last_layer_attention(model, pixels, heads)
    assert tower.num_heads == heads
    torch.testing.assert_close(received, weights.mean(dim=(1, 2))[:, -tower.num_patches :], atol=1e-6, rtol=0)


def _last_layer_attention(model: torch.nn.Module, pixels: torch.Tensor, heads: int) -> torch.Tensor:
    """Softmax weights [b, h, t, t] of the tower's last layer."""
    visual = model.visual
    is_clip = hasattr(visual, "transformer")
    layer = (visual.transformer.resblocks if is_clip else visual.trunk.blocks)[-1].attn
    norm = visual.transformer.resblocks[-1].ln_1 if is_clip else visual.trunk.blocks[-1].norm1
    seen: list[torch.Tensor] = []
    handle = norm.register_forward_hook(lambda _, args, output: seen.append(output))
    visual(pixels)
    handle.remove()
    reference = torch.nn.MultiheadAttention(seen[0].shape[2], heads, batch_first=True)
    reference.in_proj_weight.copy_(layer.in_proj_weight if is_clip else layer.qkv.weight)
    reference.in_proj_bias.copy_(layer.in_proj_bias if is_clip else layer.qkv.bias)
    return reference(seen[0], seen[0], seen[0], average_attn_weights=False)[1]


def test_reads_sizes_and_freezes() -> None:
    tower, _ = tower_and_model(clip_config())
    assert (tower.patch_dim, tower.num_patches, tower.image_size) == (32, 16, (32, 32))
    assert not any(p.requires_grad for p in tower.parameters())
    assert not tower.training


def test_towers_without_patch_tokens_are_refused() -> None:
    resnet = clip_config(layers=[1, 1, 1, 1], width=16, patch_size=None)
    with pytest.raises(ModelError, match="no patch features"):
        vision_tower(random_clip(resnet).visual)
    convolutional = timm_config("resnet18", 64, pool="avg", embed_dim=512)
    with pytest.raises(ModelError, match="no patch features"):
        vision_tower(random_clip(convolutional).visual)
    with pytest.raises(ModelError, match="need at least 2"):
        vision_tower(random_clip(clip_config(layers=1)).visual)
