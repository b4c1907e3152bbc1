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

    Attributes:
        bias: bias [outputs].
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.bias = bias
        operators: Any = torch.ops.mkldnn
        packs = weight.device.type == "cpu" and _has_kernel(weight.dtype)
        self._product = getattr(operators, "_linear_pointwise", None) if packs else None
        self._weight = weight if self._product is None else operators._reorder_linear_weight(weight)

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weight matrix [outputs, inputs]."""
        return self._weight.to_dense()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `x` [..., inputs] to [..., outputs]. `x` must have the data type of the weight matrix."""
        if self._product is None:
            return functional.linear(x, self._weight, self.bias)
        result: torch.Tensor = self._product(x, self._weight, self.bias, "none", [], "")
        return result


def _has_kernel(dtype: torch.dtype) -> bool:
    operators: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(operators._is_mkldnn_bf16_supported()))


class LinearLayer(torch.nn.Module):
    """Takes the place of a linear layer in a module whose weights are fixed.

    Args:
        layer: the layer to replace.
        dtype: data type of the matrix product and of the result.
    """

    def __init__(self, layer: torch.nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        weight = layer.weight.detach().to(dtype)
        bias = torch.zeros_like(weight[:, 0]) if layer.bias is None else layer.bias.detach().to(dtype)
        self._linear = Linear(weight, bias)

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weight matrix [outputs, inputs]. Some modules of timm use it for a product of their own."""
        return self._linear.weight

    @property
    def bias(self) -> torch.Tensor:
        """Bias [outputs]."""
        return self._linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `x` [..., inputs] to [..., outputs]."""
        return self._linear(x.to(self._dtype))


def replace_linear_layers(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Replace the linear layers in `module`, which is on a CPU and only computes, by layers of class `LinearLayer`."""
    for name, child in module.named_children():
        if type(child) is torch.nn.Linear:
            setattr(module, name, LinearLayer(child, dtype))
        elif not isinstance(child, torch.nn.MultiheadAttention):  # it uses its weights without calling its layers
            replace_linear_layers(child, dtype)
