"""Loads the towers of a bundle."""

from __future__ import annotations

import torch

from edje_index.bundles.info import VISION_FOLDER, VISION_WEIGHTS, BundleInfo
from edje_index.models.clip_config import HF_TEXT_FOLDER, ClipConfig
from edje_index.models.clip_model import build_clip
from edje_index.models.size_limit import limited_by
from edje_index.models.text_tower import TextTower, text_tokenizer
from edje_index.models.weights import assign_weights, read_weights


def load_clip(info: BundleInfo, config: ClipConfig) -> torch.nn.Module:
    """Load the open_clip model with both towers, frozen, onto the CPU."""
    weights = info.path / VISION_WEIGHTS
    with limited_by(weights):
        clip = build_clip(config, info.path / VISION_FOLDER / HF_TEXT_FOLDER if config.hf_text_name else None)
    assign_weights(clip, read_weights(weights), str(weights))
    return clip.requires_grad_(False)


def load_clip_text_tower(info: BundleInfo, config: ClipConfig, device: torch.device) -> TextTower:
    """Load the text tower of a bundle onto `device`."""
    tokenizer = text_tokenizer(config, info.path / VISION_FOLDER)
    return TextTower(load_clip(info, config).to(device), tokenizer)
