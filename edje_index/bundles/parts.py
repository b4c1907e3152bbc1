"""Loads the parts of a bundle one by one, and checks that the parts that score pairs fit together.

Each function imports only what its part needs: searches use neither open_clip nor transformers if they can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edje_index.bundles.info import (
    ADAPTER_WEIGHTS,
    BANK_WEIGHTS,
    INFO_FILE,
    JOINT_CONFIG,
    JOINT_FOLDER,
    JOINT_WEIGHTS,
    VISION_FOLDER,
    VISION_WEIGHTS,
    BundleInfo,
)
from edje_index.errors import ModelError
from edje_index.models.adapter import Adapter, AdapterConfig, build_adapter
from edje_index.models.bert import BertShape
from edje_index.models.clip_config import HF_TEXT_FOLDER, ClipConfig, read_clip_config
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.joint_scorer import JointScorer
from edje_index.models.safety import read_configuration
from edje_index.models.weights import assign_weights, limited_by, read_weights
from edje_index.scoring.parts import HubnessBank, PooledSimilarity, ScoreModels
from edje_index.scoring.weights import DirectionWeights, check_parts

if TYPE_CHECKING:
    from edje_index.models.joint_encoder import JointEncoder
    from edje_index.models.text_tower import TextTower
    from edje_index.models.vision_tower import VisionTower

POOLED = "pooled."


def load_clip_towers(info: BundleInfo, config: ClipConfig) -> torch.nn.Module:
    """Load the open_clip model with both towers, frozen, onto the CPU."""
    from edje_index.models.clip_model import build_clip

    weights = info.path / VISION_WEIGHTS
    with limited_by(weights):
        clip = build_clip(config, info.path / VISION_FOLDER / HF_TEXT_FOLDER if config.hf_text_name else None)
    assign_weights(clip, read_weights(weights), str(weights))
    return clip.requires_grad_(False)


def load_clip_text_tower(info: BundleInfo, config: ClipConfig, device: torch.device) -> TextTower:
    """Load the text tower of a bundle onto `device`."""
    from edje_index.models.text_tower import TextTower, text_tokenizer

    tokenizer = text_tokenizer(config, info.path / VISION_FOLDER)
    return TextTower(load_clip_towers(info, config).to(device), tokenizer)


def load_visual(info: BundleInfo) -> tuple[VisionTower, ClipConfig]:
    """Load the vision tower of a bundle, and the configuration of the open_clip model."""
    from edje_index.models.clip_model import build_visual
    from edje_index.models.vision_tower import vision_tower

    config = read_clip_config(info.path / VISION_FOLDER, info.vision_name)
    weights = info.path / VISION_WEIGHTS
    with limited_by(weights):
        visual = build_visual(config)
    assign_weights(visual, read_weights(weights, prefix="visual."), str(weights))
    return vision_tower(visual), config


def load_adapter(info: BundleInfo) -> Adapter:
    """Load the adapter of a bundle, with frozen weights."""
    config = AdapterConfig.from_json(info.adapter, info.path / INFO_FILE)
    weights = info.path / ADAPTER_WEIGHTS
    with limited_by(weights):
        adapter = build_adapter(config)
    assign_weights(adapter, read_weights(weights), str(weights))
    return adapter.requires_grad_(False)


def load_joint_encoder(info: BundleInfo) -> JointEncoder:
    """Load the joint encoder of a bundle, for training."""
    from edje_index.models.joint_encoder import JointEncoder, bert_config

    tokenizer = load_joint_tokenizer(info.path / JOINT_FOLDER, canonical=info.canonical_captions)
    path = info.path / JOINT_WEIGHTS
    with limited_by(path):
        joint = JointEncoder(bert_config(info.path / JOINT_CONFIG), tokenizer, int(info.joint["text_embed_dim"]))
    state = {name: tensor for name, tensor in read_weights(path).items() if not name.startswith(POOLED)}
    assign_weights(joint, state, str(path))
    return joint


def load_scorer(info: BundleInfo, dtype: torch.dtype, device: torch.device) -> JointScorer:
    """Load the joint encoder of a bundle onto `device`, for scoring."""
    tokenizer = load_joint_tokenizer(info.path / JOINT_FOLDER, canonical=info.canonical_captions)
    source = info.path / JOINT_CONFIG
    shape = BertShape.parse(read_configuration(source), str(source))
    path = info.path / JOINT_WEIGHTS
    return JointScorer(tokenizer, shape, read_weights(path), source=str(path), dtype=dtype, device=device)


def load_pooled_similarity(info: BundleInfo, width: int) -> PooledSimilarity | None:
    """Load the pooled similarity of a bundle. Return None if the bundle has none.

    `width` is the width of the joint encoder.
    """
    sizes = info.pooled_similarity
    if sizes is None:
        return None
    path = info.path / JOINT_WEIGHTS
    with limited_by(path):
        pooled = PooledSimilarity(width, **sizes)
    assign_weights(pooled, read_weights(path, prefix=POOLED), str(path))
    return pooled


def load_hubness_bank(info: BundleInfo) -> HubnessBank | None:
    """Load the hubness bank of a bundle. Return None if the bundle has none."""
    sizes = info.hubness_bank
    if sizes is None:
        return None
    if BANK_WEIGHTS not in info.files:
        raise ModelError(
            f"the bundle {info.path} lacks {BANK_WEIGHTS}: copy the whole bundle directory, or make the bundle again"
        )
    path = info.path / BANK_WEIGHTS
    with limited_by(path):
        bank = HubnessBank(embed_dim=info.embed_dim, **sizes)
    assign_weights(bank, read_weights(path), str(path))
    return bank


def check_scorer_fit(adapter: AdapterConfig, models: ScoreModels, score: DirectionWeights) -> None:
    """Check that the parts of a bundle fit together.

    Args:
        adapter: configuration of the adapter.
        models: models that compute the parts of the final score.
        score: weights of the final score.

    Raises:
        ModelError: the adapter and the joint encoder have different token widths, `models` lacks a part that
            `score` needs, or the hubness bank does not fit the pooled similarity.
    """
    if adapter.language_dim != models.joint.width and not adapter.is_feature:
        raise ModelError(
            f"the adapter makes tokens of width {adapter.language_dim}, but the joint encoder reads "
            f"tokens of width {models.joint.width}: use an adapter and a joint encoder of the same "
            "training run"
        )
    for weights in (score.t2i, score.i2t):
        check_parts(weights, models.part_names, "the bundle")
    if models.bank is None:
        return
    bank_dim, dim = models.bank.sizes["dim"], 0 if models.pooled is None else models.pooled.sizes["dim"]
    if bank_dim != dim:
        raise ModelError(
            f"the hubness bank has vectors of width {bank_dim}, but the pooled similarity has width "
            f"{dim}: use a bank and a pooled similarity of the same training run"
        )
