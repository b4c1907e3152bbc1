"""Linear layers for inference, with the fastest kernels in torch for CPUs.

The kernels are part of oneDNN. They are fast if the weights are rearranged only once,
instead of at each call. Only private operators of torch allow this, and only they use
oneDNN for float32. The operators are tested with torch 2.8 to 2.13. If torch or the
processor lacks them, this module uses the default matrix product of torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """A linear layer with fixed weights.

    Args:
        weight: weight matrix [outputs, inputs].
        bias: bias [outputs]. It has the data type of `weight`.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        operators: Any = torch.ops.mkldnn
        packs = (
            weight.device.type == "cpu"
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and (
                weight.dtype == torch.float32
                or (
                    weight.dtype == torch.bfloat16
                    and bool(operators._is_mkldnn_bf16_supported())
                )
            )
        )
        self.bias = bias
        self._product = getattr(operators, "_linear_pointwise", None) if packs else None
        self._weight = (
            weight
            if self._product is None
            else operators._reorder_linear_weight(weight)
        )

    @property
    def weight(self) -> Tensor:
        """A copy of the weight matrix [outputs, inputs]. Some modules of timm read the
        weight of a layer, and compute the matrix product themselves.
        """
        return self._weight.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., inputs] to [..., outputs], in the data type of the weight
        matrix.
        """
        x = x.to(self.bias.dtype)
        if self._product is None:
            return functional.linear(x, self._weight, self.bias)
        result: Tensor = self._product(x, self._weight, self.bias, "none", [], "")
        return result


def replace_linear_layers(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the linear layers in `module` by layers of class `Linear`.

    `module` must be on a CPU, and cannot be trained afterwards. `dtype` is the data
    type of the matrix products and of the results.
    """
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            weight = child.weight.detach().to(dtype)
            bias = (
                torch.zeros_like(weight[:, 0])
                if child.bias is None
                else child.bias.detach().to(dtype)
            )
            setattr(module, name, Linear(weight, bias))
        elif not isinstance(child, nn.MultiheadAttention):
            # The layers of a MultiheadAttention are not replaced, because it reads
            # their weights instead of calling them.
            replace_linear_layers(child, dtype)
