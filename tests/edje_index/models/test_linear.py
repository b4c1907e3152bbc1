"""The linear layers for inference, against torch's own and in the vision towers of
timm and open_clip.
"""

import pytest
import torch

from edje_index.models.linear import Linear, replace_linear_layers
from edje_index.models.vision_tower import vision_tower
from tests.edje_index.towers import clip_config, random_clip, random_pixels, timm_config

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
