"""Makes a joint encoder from a Hugging Face BERT model."""

from __future__ import annotations

from pathlib import Path

import torch

from edje_index.errors import ModelError
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.weights import State, check_finite, read_checkpoint, read_weights

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
POOLER = {"bert.pooler.dense.weight": "0.dense.weight", "bert.pooler.dense.bias": "0.dense.bias"}
HEAD = "cls.predictions."


def load_language_model(folder: Path, embed_dim: int) -> JointEncoder:
    """Return a joint encoder with the weights of the BERT model in `folder`, in float32.

    ``<image>`` is appended to the vocabulary. The pooler becomes the first layer of the scoring head. A language-model
    head in `folder` is loaded too. All other weights are random.

    Args:
        folder: folder with ``config.json``, ``model.safetensors`` (or ``pytorch_model.bin``) and the tokenizer.
        embed_dim: width of the text embeddings that the joint encoder learns to recover.

    Raises:
        ModelError: `folder` does not contain a BERT model, or the weights do not fit ``config.json``.
    """
    tokenizer = load_joint_tokenizer(folder)
    config = bert_config(folder / "config.json")
    state = _read(folder)
    if WORD_EMBEDDINGS not in state or state[WORD_EMBEDDINGS].shape != (config.vocab_size, config.hidden_size):
        raise ModelError(
            f"the weights in {folder} do not fit its config.json: {WORD_EMBEDDINGS} is missing or has another shape; "
            "give another directory"
        )
    vocabulary = max(int(config.vocab_size), len(tokenizer))
    joint = JointEncoder(bert_config(folder / "config.json", vocab_size=vocabulary), tokenizer, embed_dim)
    _assign(joint, state, folder)
    check_finite(joint.state_dict(), str(folder))
    return joint


def _read(folder: Path) -> State:
    """Read the weights in `folder` as float32, by name."""
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise ModelError(
            f"there are no weights in {folder}, neither {' nor '.join(WEIGHTS)}; give the directory of a BERT model"
        )
    raw: State = read_weights(path) if path.suffix == ".safetensors" else read_checkpoint(path)
    named = {k if k.startswith(("bert.", "cls.")) else f"bert.{k}": v for k, v in raw.items()}
    return {k: v.float() for k, v in named.items() if not k.endswith("position_ids")}


@torch.no_grad()
def _assign(joint: JointEncoder, state: State, folder: Path) -> None:
    target = joint.language_model.state_dict()
    words = state[WORD_EMBEDDINGS].shape[0]
    target[WORD_EMBEDDINGS][:words] = state.pop(WORD_EMBEDDINGS)
    pooler = {POOLER[name]: state.pop(name) for name in list(state) if name in POOLER}
    if len(pooler) == len(POOLER):
        joint.classification_head.load_state_dict(pooler, strict=False)
    for name, tensor in state.items():
        if name.startswith(HEAD):
            if name == f"{HEAD}bias":
                target[name][:words] = tensor
            elif ".transform." in name:
                target[name].copy_(tensor)
        elif name in target and target[name].shape == tensor.shape:
            target[name].copy_(tensor)
        elif name.startswith("bert."):
            raise ModelError(
                f"the weights in {folder} do not fit its config.json: {name} has the shape {list(tensor.shape)}; "
                "give another directory"
            )
    missing = [name for name in target if name.startswith("bert.") and name not in state and name != WORD_EMBEDDINGS]
    if missing:
        raise ModelError(
            f"the weights in {folder} lack {len(missing)} tensors of the language model, for example "
            f"{missing[0]}; give another directory"
        )
