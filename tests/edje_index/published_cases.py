"""Checkpoints in the published format with random weights, and their scores by plain tensor arithmetic.

The arithmetic is written out from the paper and the format's description, and shares nothing with the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from edje_index.models._torchvision_compat import prepare_torchvision

prepare_torchvision()

from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "red", "car", "on", "the", "beach", "!", ",", "##s"]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
State = dict[str, torch.Tensor]


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


def write_case(folder: Path, case: Case, seed: int = 0) -> State:
    """Write ``checkpoint.pth`` and ``tokenizer/``; returns the state that was written."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = _state(case)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"num_compressed_tokens": case.tokens, "multimodal_projection_hidden_dim": case.hidden}
    torch.save({"model": state, "epoch": 1, "global_step": 2, "config": config}, folder / "checkpoint.pth")
    write_tokenizer(folder / "tokenizer", case)
    return state


def write_tokenizer(folder: Path, case: Case, image_token: bool = True) -> None:
    """The tokenizer's files; ``config.json`` has the positions and words from before training extended them."""
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    if image_token:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    config = _config(case).to_dict() | {"vocab_size": len(WORDS), "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))


def _config(case: Case) -> BertConfig:
    return BertConfig(
        vocab_size=len(WORDS) + 1,
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        intermediate_size=3 * case.width,
        max_position_embeddings=case.positions,
        hidden_act=case.activation,
        initializer_range=0.3,
    )


def _state(case: Case) -> State:
    language = BertForMaskedLM(_config(case))
    state = {f"language_model.{k}": v.clone() for k, v in language.state_dict().items()}
    state["text_embeddings.weight"] = state["language_model.bert.embeddings.word_embeddings.weight"]
    state["clip.logit_scale"] = torch.zeros(())
    state["vision_encoder.vision_model.embeddings.patch_embedding.bias"] = torch.zeros(8)
    linears = {"classification_head.0.dense": (case.width, case.width), "classification_head.1": (1, case.width)}
    linears["text_projection"] = (7, case.width)
    adapter = "vision_projection."
    if case.tokens is None:
        linears |= {adapter + "0": (case.hidden, case.vision_dim), adapter + "2": (case.width, case.hidden)}
    else:
        square = (case.vision_dim, case.vision_dim)
        linears |= {adapter + "key": square, adapter + "value": square, adapter + "attention.out_proj": square}
        linears |= {adapter + "mlp.fc1": (case.hidden, square[0]), adapter + "mlp.fc2": (square[0], case.hidden)}
        linears[adapter + "projection"] = (case.width, case.vision_dim)
        state[adapter + "query"] = torch.randn(1, case.tokens, case.vision_dim)
        state[adapter + "attention.in_proj_weight"] = torch.randn(3 * case.vision_dim, case.vision_dim) * 0.3
        state[adapter + "attention.in_proj_bias"] = torch.randn(3 * case.vision_dim) * 0.3
        state[adapter + "layernorm.weight"] = torch.rand(case.vision_dim) + 0.5
        state[adapter + "layernorm.bias"] = torch.randn(case.vision_dim) * 0.3
    for name, shape in linears.items():
        state[name + ".weight"] = torch.randn(shape) * 0.3
        state[name + ".bias"] = torch.randn(shape[0]) * 0.3
    return state


def expected_tokens(state: State, case: Case, patches: torch.Tensor) -> torch.Tensor:
    """The adapter's output [b, m, d] by plain arithmetic."""
    weights = {k.removeprefix("vision_projection."): v for k, v in state.items() if k.startswith("vision_projection.")}
    act = ACTIVATIONS[case.activation]

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    if case.tokens is None:
        return linear("2", act(linear("0", patches)))
    queries = weights["query"].repeat(len(patches), 1, 1)
    inputs = (queries, linear("key", patches), linear("value", patches))
    weight = weights["attention.in_proj_weight"].chunk(3)
    bias = weights["attention.in_proj_bias"].chunk(3)
    q, k, v = (x @ w.T + b for x, w, b in zip(inputs, weight, bias, strict=True))
    attended = linear("attention.out_proj", _attention(q, k, v, case.vision_heads, None))
    centred = attended - attended.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + case.eps).sqrt()
    normal = normal * weights["layernorm.weight"] + weights["layernorm.bias"]
    return linear("projection", attended + linear("mlp.fc2", act(linear("mlp.fc1", normal))))


def expected_scores(state: State, case: Case, inputs: Any, tokens: torch.Tensor, image_id: int) -> torch.Tensor:
    """Logits [b] by plain arithmetic, from the rows that a stock tokenizer made."""
    bert = {k.removeprefix("language_model.bert."): v for k, v in state.items()}
    words = bert["embeddings.word_embeddings.weight"][inputs["input_ids"]].clone()
    words[inputs["input_ids"] == image_id] = tokens.reshape(-1, case.width)
    table = bert["embeddings.position_embeddings.weight"]
    length = words.shape[1]
    table = torch.cat([table, table[-1:].repeat(max(0, length - len(table)), 1)])[:length]
    hidden = words + table + bert["embeddings.token_type_embeddings.weight"][inputs["token_type_ids"]]
    hidden = _layer_norm(bert, "embeddings.LayerNorm", hidden)
    mask = torch.where(inputs["attention_mask"] > 0, 0.0, -torch.inf)[:, None, None]
    for layer in range(case.layers):
        hidden = _bert_layer(bert, f"encoder.layer.{layer}.", case, hidden, mask)
    pooled = _linear(state, "classification_head.0.dense", hidden[:, 0]).tanh()
    return _linear(state, "classification_head.1", pooled)[:, 0]


def _bert_layer(bert: State, at: str, case: Case, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q, k, v = (_linear(bert, f"{at}attention.self.{name}", hidden) for name in ("query", "key", "value"))
    attended = _linear(bert, at + "attention.output.dense", _attention(q, k, v, case.heads, mask))
    hidden = _layer_norm(bert, at + "attention.output.LayerNorm", hidden + attended)
    inner = ACTIVATIONS[case.activation](_linear(bert, at + "intermediate.dense", hidden))
    return _layer_norm(bert, at + "output.LayerNorm", hidden + _linear(bert, at + "output.dense", inner))


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None
) -> torch.Tensor:
    def split(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)

    q, k, v = split(q), split(k), split(v)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def _linear(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ state[name + ".weight"].T + state[name + ".bias"]


def _layer_norm(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], state[name + ".weight"], state[name + ".bias"], 1e-12)
