"""Linear layers for inference, with the fastest float32 kernel in torch for CPUs.

This kernel is in oneDNN. For float32, torch reaches oneDNN only through private operators. These operators are
tested with torch 2.8 to 2.13. If torch lacks these operators, this module uses the default matrix product.
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
        packs = weight.device.type == "cpu" and weight.dtype == torch.float32
        packs = packs and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._product = getattr(operators, "_linear_pointwise", None) if packs else None
        self._weight = weight if self._product is None else operators._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `x` [..., inputs] to [..., outputs]. `x` must have the data type of the weight matrix."""
        if self._product is None:
            return functional.linear(x, self._weight, self._bias)
        result: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return result
