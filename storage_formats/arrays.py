"""Arrays of numbers that callers pass in."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError


def as_array(values: Any) -> NDArray[Any]:
    """Return `values` as an array. A PyTorch tensor may be on any device, and of type
    bfloat16, which NumPy alone refuses.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        bits: NDArray[Any] = values.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: NDArray[Any] = values.numpy()
    return array


def as_finite(values: Any, name: str) -> NDArray[np.float32]:
    """Return `values` as a float32 array. A value that is NaN or infinite is refused,
    because no row could be compared with it.
    """
    array = as_array(values).astype(np.float32)
    if not np.isfinite(array).all():
        raise UsageError(
            f"{name} has a value that is NaN or infinite; correct what encodes it",
            parameter=name,
        )
    return array
