"""Small open_clip models with random weights, of the same classes as the real ones."""

import torch

from edje_index.models.clip_config import ClipConfig
from edje_index.models.clip_model import build_clip, preprocess_settings

SMALL_TEXT = {
    "context_length": 16,
    "vocab_size": 49408,
    "width": 16,
    "heads": 2,
    "layers": 1,
}
PREPROCESS = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "resize_mode": "squash"}


def clip_config(**vision):
    """open_clip's own transformer: class token, 16 patches of 32 pixels, width 32,
    2 heads.
    """
    settings = {
        "image_size": 32,
        "patch_size": 8,
        "width": 32,
        "layers": 3,
        "head_width": 16,
        **vision,
    }
    model = {"embed_dim": 24, "vision_cfg": settings, "text_cfg": SMALL_TEXT}
    return ClipConfig("small-clip", model, {"size": [32, 32]})


def timm_config(name, size, pool="map", embed_dim=192):
    """A timm trunk with a small text tower, set up as open_clip does SigLIP."""
    vision = {
        "image_size": size,
        "timm_model_name": name,
        "timm_model_pretrained": False,
        "timm_pool": pool,
        "timm_proj": "none",
    }
    model = {
        "embed_dim": embed_dim,
        "vision_cfg": vision,
        "text_cfg": SMALL_TEXT,
        "custom_text": True,
    }
    return ClipConfig(name, model, {"size": [size, size], **PREPROCESS})


def eval_transform(config):
    """open_clip's evaluation transform, from a PIL image to pixels, float32 [3, height,
    width].
    """
    from open_clip.transform import image_transform_v2

    return image_transform_v2(preprocess_settings(config), is_train=False)


def random_clip(config, seed=0, hf_text=None):
    """The model of a configuration with random weights drawn with ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_clip(config, hf_text)


def random_pixels(config, count=2):
    """Float32 [count, 3, height, width]."""
    return torch.randn(
        count, 3, *config.preprocess["size"], generator=torch.Generator().manual_seed(1)
    )
