"""Linear layers for inference on a CPU, in the fastest kernel that torch has for float32.

torch's own float32 product is MKL's, which uses half the vector width on processors that are not Intel's. oneDNN, which
torch contains too, uses all of it, but torch offers it for float32 only through the operators that its compiler emits.
Their names are private: tested with torch 2.8 to 2.13. Where they are missing, torch's own product is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class Linear:
    """A fixed linear map of the last dimension.

    Args:
        weight: [outputs, inputs].
        bias: [outputs].
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self._bias = bias
        operators: Any = torch.ops.mkldnn
        packs = weight.device.type == "cpu" and weight.dtype == torch.float32
        packs = packs and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._product = getattr(operators, "_linear_pointwise", None) if packs else None
        self._weight = weight if self._product is None else operators._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs], of the weight's data type."""
        if self._product is None:
            return functional.linear(x, self._weight, self._bias)
        result: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return result
