"""Conversion of token blocks to PyTorch tensors. Only this module of the package imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from storage_formats.codecs import Blocks
from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"


@name_missing_extra("search")
def to_tensor(blocks: Blocks) -> Tensor:
    """Return a torch.bfloat16 tensor on the CPU that has the shape of `blocks` and shares memory with `blocks`.

    `torch.from_numpy` refuses the NumPy type ml_dtypes.bfloat16, so the bits are reinterpreted.

    Raises:
        MissingExtraError: PyTorch is not installed.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> from storage_formats.torch_conversion import to_tensor
        >>> to_tensor(np.array([1, 2.5], ml_dtypes.bfloat16))
        tensor([1.0000, 2.5000], dtype=torch.bfloat16)
    """
    import torch

    return torch.from_numpy(blocks.view(np.int16)).view(torch.bfloat16)
