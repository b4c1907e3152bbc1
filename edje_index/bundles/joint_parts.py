"""The parts of a model bundle that score pairs: joint encoder, pooled similarity and hubness bank.

``joint/model.safetensors`` holds the joint encoder and, under the prefix ``pooled.``, the pooled similarity.
"""

from __future__ import annotations

from pathlib import Path

from edje_index.bundles.info import BANK_WEIGHTS, JOINT_CONFIG, JOINT_FOLDER, JOINT_WEIGHTS, BundleInfo
from edje_index.errors import ModelError
from edje_index.filesystem import write_json
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.weights import assign_weights, distinct_tensors, read_weights, save_tensors
from edje_index.scoring.hubness import HubnessBank
from edje_index.scoring.pooled_similarity import PooledSimilarity

_POOLED = "pooled."


def load_joint_encoder(info: BundleInfo) -> tuple[JointEncoder, PooledSimilarity | None]:
    """The joint encoder of a bundle, and its pooled similarity if it has one."""
    tokenizer = load_joint_tokenizer(info.path / JOINT_FOLDER, canonical=info.canonical_captions)
    joint = JointEncoder(bert_config(info.path / JOINT_CONFIG), tokenizer, int(info.joint["text_embed_dim"]))
    sizes = info.pooled_similarity
    pooled = None if sizes is None else PooledSimilarity(joint.width, **sizes)
    path = info.path / JOINT_WEIGHTS
    state = read_weights(path)
    if pooled is not None:
        names = [name for name in state if name.startswith(_POOLED)]
        assign_weights(pooled, {name.removeprefix(_POOLED): state.pop(name) for name in names}, str(path))
    assign_weights(joint, state, str(path))
    return joint, pooled


def save_joint_encoder(joint: JointEncoder, pooled: PooledSimilarity | None, folder: Path) -> None:
    """Write the files of ``joint/`` into a new bundle at `folder`."""
    (folder / JOINT_FOLDER).mkdir()
    state = distinct_tensors(joint)
    if pooled is not None:
        state.update({f"{_POOLED}{name}": tensor for name, tensor in distinct_tensors(pooled).items()})
    save_tensors(state, folder / JOINT_WEIGHTS)
    joint.tokenizer.save(folder / JOINT_FOLDER)
    write_json(folder / JOINT_CONFIG, joint.config.to_dict())


def load_hubness_bank(info: BundleInfo) -> HubnessBank | None:
    """The bank of the hubness correction; None if the bundle has none."""
    sizes = info.hubness_bank
    if sizes is None:
        return None
    if BANK_WEIGHTS not in info.files:
        raise ModelError(f"the bundle {info.path} lacks {BANK_WEIGHTS}: copy the whole directory, or make it again")
    return HubnessBank.load(info.path / BANK_WEIGHTS, info.embed_dim, sizes)
