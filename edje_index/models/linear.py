"""Linear layers for inference, with the fastest kernels in torch for CPUs.

These kernels are in oneDNN. Only private operators of torch reach them with float32, or with weights that are
rearranged once instead of at each call. The operators are tested with torch 2.8 to 2.13. If torch or the processor
lacks them, this module uses the default matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class Linear:
    """A linear layer with fixed weights.

    Args:
        weight: weight matrix [outputs, inputs].
        bias: bias [outputs].
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self._bias = bias
        operators: Any = torch.ops.mkldnn
        packs = weight.device.type == "cpu" and _has_kernel(weight.dtype)
        self._product = getattr(operators, "_linear_pointwise", None) if packs else None
        self._weight = weight if self._product is None else operators._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `x` [..., inputs] to [..., outputs]. `x` must have the data type of the weight matrix."""
        if self._product is None:
            return functional.linear(x, self._weight, self._bias)
        result: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return result


def _has_kernel(dtype: torch.dtype) -> bool:
    operators: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(operators._is_mkldnn_bf16_supported()))
