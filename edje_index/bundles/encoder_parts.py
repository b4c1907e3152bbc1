"""Loads the vision tower and the adapter of a bundle, for indexing."""

from __future__ import annotations

from edje_index.bundles.info import ADAPTER_WEIGHTS, INFO_FILE, VISION_FOLDER, VISION_WEIGHTS, BundleInfo
from edje_index.errors import ModelError
from edje_index.models.adapter import Adapter, AdapterConfig, build_adapter
from edje_index.models.clip_config import ClipConfig, read_clip_config
from edje_index.models.clip_model import build_visual
from edje_index.models.size_limit import limited_by
from edje_index.models.vision_tower import VisionTower, vision_tower
from edje_index.models.weights import assign_weights, read_weights


def load_visual(info: BundleInfo) -> tuple[VisionTower, ClipConfig]:
    """Load the vision tower of a bundle, and the configuration of the open_clip model."""
    config = read_clip_config(info.path / VISION_FOLDER, info.vision_name)
    weights = info.path / VISION_WEIGHTS
    with limited_by(weights):
        visual = build_visual(config)
    assign_weights(visual, read_weights(weights, prefix="visual."), str(weights))
    return vision_tower(visual), config


def load_adapter(info: BundleInfo) -> Adapter:
    """Load the adapter of a bundle, with frozen weights."""
    try:
        config = AdapterConfig.from_json(info.adapter)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{info.path / INFO_FILE} describes an adapter that this version does not support: {error}; "
            "upgrade edje-index"
        ) from error
    weights = info.path / ADAPTER_WEIGHTS
    with limited_by(weights):
        adapter = build_adapter(config)
    assign_weights(adapter, read_weights(weights), str(weights))
    return adapter.requires_grad_(False)
