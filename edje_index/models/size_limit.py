"""Limits the size of a model to the size of its weights file.

Without this limit, a configuration of a few bytes could allocate any amount of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from edje_index.errors import ModelError

_FACTORIES = frozenset({
    torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randint,
    torch.randn, torch.tril, torch.triu, torch.zeros,
})  # fmt: skip
_ELEMENTS_PER_BYTE = 1  # an element takes at least 2 bytes in the file, but some models allocate a tensor twice
_SPARE_ELEMENTS = 16 << 20  # for masks and other tensors that are not in the file
_TENSOR_BYTES = 16  # lower limit of the bytes that a tensor takes in the file, including its name
_SPARE_TENSORS = 10_000


class ModelTooLargeError(ModelError):
    """A configuration describes a larger model than the weights file can contain."""


@contextmanager
def limited_by(weights: Path) -> Iterator[None]:
    """Context manager that limits the tensors created in the context to the size of the file `weights`.

    Raises:
        ModelTooLargeError: more elements or tensors are created than the file can contain.
        ModelError: the file is missing, a value of the configuration is not valid, or there is too little memory.
    """
    try:
        length = weights.stat().st_size
        with _Budget(weights, length):
            yield
    except OSError as error:
        raise ModelError(f"cannot read the weights {weights}: {error.strerror}; restore this file") from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(
            f"cannot build the model for the weights {weights}: {reason}; restore the configuration of the model"
        ) from error


class _Budget(TorchFunctionMode):
    def __init__(self, weights: Path, length: int) -> None:
        super().__init__()
        self._weights = weights
        self._length = length
        self._elements = _ELEMENTS_PER_BYTE * length + _SPARE_ELEMENTS
        self._tensors = length // _TENSOR_BYTES + _SPARE_TENSORS

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in _FACTORIES:
            self._tensors -= 1
            self._elements -= _elements(func, args, options)
            if min(self._tensors, self._elements) < 0:
                raise ModelTooLargeError(
                    f"the configuration describes a larger model than the {self._length} bytes of {self._weights} "
                    "can contain: restore the weights if they are truncated, otherwise do not use this model"
                )
        return func(*args, **options)


def _elements(func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> int:
    """Return the number of elements that the call ``func(*args, **options)`` would allocate."""
    if any(isinstance(value, torch.Tensor) for value in args):
        return max(value.numel() for value in args if isinstance(value, torch.Tensor))
    shape = options.get("size", args[0] if args and isinstance(args[0], Sequence) else None)
    if shape is not None:
        return math.prod(int(value) for value in shape)
    return int(func(*args, **{**options, "device": "meta"}).numel())
