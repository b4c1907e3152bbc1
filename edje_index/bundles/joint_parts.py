"""Loads and saves the directory ``joint/`` of a bundle, for training."""

from __future__ import annotations

from pathlib import Path

from edje_index.bundles.info import JOINT_CONFIG, JOINT_FOLDER, JOINT_WEIGHTS, BundleInfo
from edje_index.bundles.scorer_parts import POOLED, load_pooled_similarity
from edje_index.filesystem import write_json
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.size_limit import limited_by
from edje_index.models.weights import assign_weights, distinct_tensors, read_weights, save_tensors
from edje_index.scoring.pooled_similarity import PooledSimilarity


def load_joint_encoder(info: BundleInfo) -> tuple[JointEncoder, PooledSimilarity | None]:
    """Load the joint encoder and the pooled similarity of a bundle. Return None for a missing pooled similarity."""
    tokenizer = load_joint_tokenizer(info.path / JOINT_FOLDER, canonical=info.canonical_captions)
    path = info.path / JOINT_WEIGHTS
    with limited_by(path):
        joint = JointEncoder(bert_config(info.path / JOINT_CONFIG), tokenizer, int(info.joint["text_embed_dim"]))
    state = {name: tensor for name, tensor in read_weights(path).items() if not name.startswith(POOLED)}
    assign_weights(joint, state, str(path))
    return joint, load_pooled_similarity(info, joint.width)


def save_joint_encoder(joint: JointEncoder, pooled: PooledSimilarity | None, folder: Path) -> None:
    """Write the directory ``joint/`` of a new bundle in `folder`."""
    (folder / JOINT_FOLDER).mkdir()
    state = distinct_tensors(joint)
    if pooled is not None:
        state.update({f"{POOLED}{name}": tensor for name, tensor in distinct_tensors(pooled).items()})
    save_tensors(state, folder / JOINT_WEIGHTS)
    joint.tokenizer.save(folder / JOINT_FOLDER)
    write_json(folder / JOINT_CONFIG, joint.config.to_dict())
