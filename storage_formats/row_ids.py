"""Validation of row ids and other indices that callers pass in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import RowIdError, UsageError

RowIds: TypeAlias = Sequence[int] | NDArray[np.integer]
"""Row ids, [k]: any sequence or array of integers."""


def check_row_ids(row_ids: RowIds, rows: int) -> NDArray[np.int64]:
    """Return `row_ids` as an array, int64 [k].

    Raises:
        UsageError: `row_ids` is not a flat sequence of integers.
    """
    ids = as_indices(row_ids, "row_ids")
    if ids.size and (ids.min() < 0 or ids.max() >= rows):
        outside = ids[(ids < 0) | (ids >= rows)]
        others = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
        raise RowIdError(
            f"row id {outside[0]}{others} is out of range; the index has the row ids 0"
            f" to {rows - 1}"
        )
    return ids.astype(np.int64)


def as_indices(
    values: Sequence[int] | NDArray[np.integer], name: str
) -> NDArray[np.integer]:
    """Return `values` as a flat array of integers, [k].

    Raises:
        UsageError: `values` is not a flat sequence of integers.
    """
    try:
        indices = np.asarray(values)
    except ValueError as error:
        # nested sequences of different lengths
        raise UsageError(
            f"{name} must be a flat sequence of integers: {error}"
        ) from None
    if indices.ndim == 1 and (indices.dtype.kind in "iu" or not indices.size):
        return indices
    hint = (
        "; convert a boolean mask with numpy.flatnonzero(mask)"
        if indices.dtype == np.bool_
        else ""
    )
    raise UsageError(
        f"{name} must be a flat sequence of integers, got {indices.dtype} of shape"
        f" {list(indices.shape)}{hint}"
    )
