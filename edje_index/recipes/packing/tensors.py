"""Packs one tensor. The base of a tensor is the tensor of a base tower that training started from.

The packings are:

    base     for a tensor that equals its base: nothing is stored
    delta8   for a matrix with a base: differences of the changed rows, as int8 values with one scale per row
    int8     for a large matrix without a base: int8 values, with one scale per row
    fp16     for a large matrix without a base: values rounded to float16
    raw      for all other tensors: stored unchanged

A base may have fewer rows than the tensor; missing rows count as zeros. Every machine computes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

BASE, DELTA8, INT8, FP16, RAW = "base", "delta8", "int8", "fp16", "raw"
NEW_TENSOR_PACKINGS = (FP16, INT8)
RAW_ELEMENTS = 1 << 17
_LARGEST = 127
Array = np.ndarray[Any, np.dtype[Any]]
Parts = dict[str, Array]


def pack_tensor(tensor: Array, base: Array | None, new_tensors: str) -> tuple[str, Parts]:
    """Choose a packing for `tensor`. Return the name of the packing and the packed arrays.

    Args:
        tensor: tensor to pack [r, ...].
        base: base of the tensor [r', ...], with r' <= r; None for a tensor without a base.
        new_tensors: packing of large tensors without a base: ``fp16`` or ``int8``.
    """
    if base is not None and tensor.shape == base.shape and np.array_equal(tensor, base):
        return BASE, {}
    if tensor.dtype != np.float32 or tensor.ndim < 2 or (base is None and tensor.size <= RAW_ELEMENTS):
        return RAW, {"values": tensor}
    if base is not None:
        difference = _rows(tensor) - _rows(_extended(base, tensor.shape))
        changed = np.flatnonzero(difference.any(axis=1))
        codes, scales = _quantised(difference[changed])
        return DELTA8, {"rows": changed.astype(np.int32), "codes": codes, "scales": scales}
    if new_tensors == FP16:
        return FP16, {"values": tensor.astype(np.float16)}
    codes, scales = _quantised(_rows(tensor))
    return INT8, {"codes": codes, "scales": scales}


def unpack_tensor(packing: str, parts: Mapping[str, Array], *, shape: tuple[int, ...], base: Array | None) -> Array:
    """Restore a tensor of ``shape`` from the packing and arrays that ``pack_tensor`` returned.

    Raises:
        ValueError, KeyError: the packing is unknown, or the arrays or the base do not fit ``shape``.
    """
    if packing == RAW:
        return parts["values"].reshape(shape)
    if packing == FP16:
        return parts["values"].astype(np.float32).reshape(shape)
    if packing == INT8:
        return (parts["codes"].astype(np.float32) * parts["scales"][:, None]).reshape(shape)
    if base is None:
        raise ValueError(f"the packing {packing!r} needs the tensor of a base tower, which is missing")
    result = _extended(base, shape)
    if packing == DELTA8:
        _rows(result)[parts["rows"]] += parts["codes"].astype(np.float32) * parts["scales"][:, None]
    elif packing != BASE:
        raise ValueError(f"the packing {packing!r} is unknown")
    return result


def _rows(tensor: Array) -> Array:
    """Return a view of `tensor` [r, ...] as a matrix with r rows."""
    return tensor.reshape(len(tensor), -1)


def _extended(base: Array, shape: tuple[int, ...]) -> Array:
    """Return `base` with rows of zeros appended up to `shape`."""
    if base.shape[1:] != shape[1:] or len(base) > shape[0]:
        raise ValueError(f"a base tensor of shape {list(base.shape)} does not fit a tensor of shape {list(shape)}")
    result = np.zeros(shape, base.dtype)
    result[: len(base)] = base
    return result


def _quantised(rows: Array) -> tuple[Array, Array]:
    """Quantise `rows`, float32 [r, k]. Return int8 codes [r, k] and float32 scales [r]."""
    scales = (np.abs(rows).max(axis=1, initial=0) / _LARGEST).astype(np.float32)
    divisors = np.where(scales > 0, scales, 1)[:, None]
    return np.clip(np.rint(rows / divisors), -_LARGEST, _LARGEST).astype(np.int8), scales
