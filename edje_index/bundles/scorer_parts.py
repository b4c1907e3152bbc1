"""Loads the parts of a bundle that score pairs, and checks that they fit together."""

from __future__ import annotations

import torch

from edje_index.bundles.info import BANK_WEIGHTS, JOINT_CONFIG, JOINT_FOLDER, JOINT_WEIGHTS, BundleInfo
from edje_index.errors import ModelError
from edje_index.models.adapter import AdapterConfig
from edje_index.models.bert import BertShape
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.joint_scorer import JointScorer
from edje_index.models.safety import read_configuration
from edje_index.models.size_limit import limited_by
from edje_index.models.weights import assign_weights, read_weights
from edje_index.scoring.hubness import HubnessBank
from edje_index.scoring.parts import ScoreModels, check_bank
from edje_index.scoring.pooled_similarity import PooledSimilarity
from edje_index.scoring.weights import DirectionWeights, check_parts

POOLED = "pooled."


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
    return HubnessBank.load(info.path / BANK_WEIGHTS, info.embed_dim, sizes)


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
        check_parts(weights, models.parts("t2i", weights.hubness_similarity), "the bundle")
    check_bank(models)
