"""Checkpoints in the published format with random weights."""

import json
from dataclasses import dataclass

import torch

from edje_index.models._torchvision_compat import prepare_torchvision

prepare_torchvision()

from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast  # noqa: E402

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "dog",
    "red",
    "car",
    "on",
    "the",
    "beach",
    "!",
    ",",
    "##s",
]


@dataclass(frozen=True)
class Case:
    """Sizes of a checkpoint; ``tokens`` None makes the local variant."""

    tokens: int | None = 6
    vision_dim: int = 24
    vision_heads: int = 3
    width: int = 16
    heads: int = 2
    layers: int = 2
    hidden: int = 40
    positions: int = 90
    activation: str = "gelu"
    eps: float = 1e-6
    patches: int = 10
    words: int = len(WORDS) + 1


def write_case(folder, case, seed=0):
    """Write ``checkpoint.pth`` and ``tokenizer/``; returns the state that was
    written.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = _state(case)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "num_compressed_tokens": case.tokens,
        "multimodal_projection_hidden_dim": case.hidden,
    }
    torch.save(
        {"model": state, "epoch": 1, "global_step": 2, "config": config},
        folder / "checkpoint.pth",
    )
    write_tokenizer(folder / "tokenizer", case)
    return state


def write_tokenizer(folder, case, image_token=True):
    """The tokenizer's files; ``config.json`` has the positions and words from
    before training extended them.
    """
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    if image_token:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    config = _config(case).to_dict() | {
        "vocab_size": len(WORDS),
        "max_position_embeddings": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _config(case):
    return BertConfig(
        vocab_size=case.words,
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        intermediate_size=3 * case.width,
        max_position_embeddings=case.positions,
        hidden_act=case.activation,
        initializer_range=0.3,
    )


def _state(case):
    language = BertForMaskedLM(_config(case))
    state = {f"language_model.{k}": v.clone() for k, v in language.state_dict().items()}
    state["text_embeddings.weight"] = state[
        "language_model.bert.embeddings.word_embeddings.weight"
    ]
    state["clip.logit_scale"] = torch.zeros(())
    state["vision_encoder.vision_model.embeddings.patch_embedding.bias"] = torch.zeros(
        8
    )
    linears = {
        "classification_head.0.dense": (case.width, case.width),
        "classification_head.1": (1, case.width),
    }
    linears["text_projection"] = (7, case.width)
    adapter = "vision_projection."
    if case.tokens is None:
        linears |= {
            adapter + "0": (case.hidden, case.vision_dim),
            adapter + "2": (case.width, case.hidden),
        }
    else:
        square = (case.vision_dim, case.vision_dim)
        linears |= {
            adapter + "key": square,
            adapter + "value": square,
            adapter + "attention.out_proj": square,
        }
        linears |= {
            adapter + "mlp.fc1": (case.hidden, square[0]),
            adapter + "mlp.fc2": (square[0], case.hidden),
        }
        linears[adapter + "projection"] = (case.width, case.vision_dim)
        state[adapter + "query"] = torch.randn(1, case.tokens, case.vision_dim)
        state[adapter + "attention.in_proj_weight"] = (
            torch.randn(3 * case.vision_dim, case.vision_dim) * 0.3
        )
        state[adapter + "attention.in_proj_bias"] = (
            torch.randn(3 * case.vision_dim) * 0.3
        )
        state[adapter + "layernorm.weight"] = torch.rand(case.vision_dim) + 0.5
        state[adapter + "layernorm.bias"] = torch.randn(case.vision_dim) * 0.3
    for name, shape in linears.items():
        state[name + ".weight"] = torch.randn(shape) * 0.3
        state[name + ".bias"] = torch.randn(shape[0]) * 0.3
    return state
