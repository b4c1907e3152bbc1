"""Type aliases of arrays, and conversions of the arrays that callers pass."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError

Array: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

# the exponent bits of bfloat16
_EXPONENT = np.uint16(0x7F80)


def as_array(values: Any) -> Array:
    """Return `values` as a NumPy array. A PyTorch tensor may be on any device. A
    bfloat16 tensor, which NumPy cannot convert, becomes an ml_dtypes.bfloat16 array.
    """
    # A tensor can only exist if the caller has imported PyTorch, so this function does
    # not import it.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        bits: Array = values.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: Array = values.numpy()
    return array


def holes(values: Array) -> Bools:
    """Return which rows have no data, bool [k].

    Args:
        values: decoded blocks [k, m, d] or embeddings [k, embed_dim]. The values of a
            hole are NaN. All values of other rows are finite.
    """
    while values.ndim > 1:
        values = values[:, 0]
    return np.isnan(values.astype(np.float32))


def finite_blocks(blocks: Array) -> Bools:
    """Return which of `blocks`, bfloat16 [k, m, d], have only finite values, bool
    [k].
    """
    # All bits of the exponent are set in NaN and infinity only.
    exponents = blocks.view(np.uint16) & _EXPONENT
    finite: Bools = (exponents != _EXPONENT).all(axis=(1, 2))
    return finite


def as_finite(values: Any, name: str) -> Floats:
    """Return `values` as a float32 array.

    Raises:
        UsageError: a value is no number, or is NaN or infinite. No similarity can be
            computed with such a value.
    """
    try:
        array = as_array(values).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} must be numbers: {error}", parameter=name) from error
    if not np.isfinite(array).all():
        raise UsageError(
            f"{name} has a value that is NaN or infinite; correct what encodes it",
            parameter=name,
        )
    return array
