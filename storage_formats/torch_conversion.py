"""Conversion of token blocks to PyTorch tensors. This is the only module of the package that imports torch."""

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
    """Return `blocks` as a torch.bfloat16 tensor on the CPU. The tensor shares memory with `blocks`.

    Use this function because `torch.from_numpy` does not accept the type ml_dtypes.bfloat16.

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
