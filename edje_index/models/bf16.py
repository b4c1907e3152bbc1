"""Converts torch tensors to NumPy arrays of ``ml_dtypes.bfloat16``, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch


def to_bf16_array(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Return ``tensor`` as an ``ml_dtypes.bfloat16`` array, rounded to nearest, ties to even."""
    bits = tensor.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16)
    return bits.numpy().view(ml_dtypes.bfloat16)


def as_tensor(array: torch.Tensor | np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    """Return ``array`` as a torch tensor of the same data type. ``ml_dtypes.bfloat16`` is supported."""
    if isinstance(array, torch.Tensor):
        return array
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(_writable(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(_writable(array))


def _writable(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return `array`, or a copy if `array` is read-only, because torch warns about read-only arrays."""
    return np.require(array, requirements=["C", "W"])
