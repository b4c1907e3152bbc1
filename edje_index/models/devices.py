"""Functions for the devices, data types and CPU threads of torch, and for conversions
between tensors and NumPy arrays.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from edje_index.errors import ModelError
from storage_formats.arguments import as_text
from storage_formats.arrays import Array

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

DTYPES = ("auto", "float32", "bfloat16")
"""Names of the data types of matrix products."""


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device named `device`. ``auto`` is CUDA if torch finds a CUDA
    device, else the CPU.

    Raises:
        ModelError: the name is unknown, or there is no such device.
    """
    device = (
        str(device) if isinstance(device, torch.device) else as_text(device, "device")
    )
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelError(
            f"unknown device {device!r}: give auto, cpu, cuda or cuda:N"
        ) from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"there is no device {device}: torch finds {torch.cuda.device_count()} CUDA"
            " devices; use device cpu"
        )
    return target


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the data type named `dtype`. ``auto`` is bfloat16 on CUDA and float32
    elsewhere.
    """
    if as_text(dtype, "dtype") not in DTYPES:
        raise ModelError(
            f"unknown data type {dtype!r}: give one of {', '.join(DTYPES)}"
        )
    uses_bfloat16 = dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")
    return torch.bfloat16 if uses_bfloat16 else torch.float32


def autocast(
    dtype: torch.dtype, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which torch computes matrix products in `dtype`."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


# functions of torch that create tensors
_FACTORIES = frozenset(
    {
        torch.arange,
        torch.empty,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.ones,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.zeros,
    }
)


class Float32Modules(TorchFunctionMode):
    """Context manager in which modules are made with float32 weights, whatever the
    default data type of torch is.

    The default is global, so it is not changed: other threads could notice.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in _FACTORIES:
            # On the device "meta", a tensor has a size but takes no memory.
            empty = func(*args, **{**options, "device": "meta"})
            self.check(empty)
            if options.get("dtype") is None and empty.is_floating_point():
                options["dtype"] = torch.float32
        return func(*args, **options)

    def check(self, tensor: Tensor) -> None:
        """Called with a tensor on the device "meta" before such a tensor is made."""


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Context manager and decorator in which neither the autocast nor the default
    device of the caller counts. With a default device, the rounding of a sum can
    differ.
    """
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@contextlib.contextmanager
def inference() -> Iterator[None]:
    """`torch.inference_mode` with the settings of `plain_torch`."""
    with plain_torch(), torch.inference_mode():
        yield


def fused_on_cuda(
    is_large: Callable[[Tensor], bool], *, dynamic: bool
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator that compiles a function of tensors to one kernel on CUDA
    devices. The kernel reads its inputs and writes its results only once.

    The kernel is compiled at the first call, in about two seconds. If no compiler is
    found, the function runs without compilation, and a warning says so.

    Args:
        is_large: function of the first argument, a tensor. It returns whether to use
            the kernel. For small tensors, looking up the compiled kernel takes more
            time than the kernel saves.
        dynamic: True compiles one kernel for all shapes. False compiles a kernel for
            each shape, which is faster.
    """

    def decorate(
        function: Callable[_Arguments, _Result],
    ) -> Callable[_Arguments, _Result]:
        kernel: Callable[_Arguments, _Result] | None = None

        @functools.wraps(function)
        def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            nonlocal kernel
            first: Any = args[0]
            if first.device.type == "cuda" and is_large(first):
                # torch.compile imports the compiler, which takes seconds, so it is
                # called only when the kernel is used for the first time.
                kernel = kernel or torch.compile(function, dynamic=dynamic)
                try:
                    return kernel(*args, **kwargs)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    kernel = function
                    warnings.warn(
                        "the GPU is slower than it could be, because torch.compile"
                        f" fails: {str(error)[:200]}; Triton needs a C compiler",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            return function(*args, **kwargs)

        return run

    return decorate


def to_bf16_array(tensor: Tensor) -> Array:
    """Return ``tensor`` as an ``ml_dtypes.bfloat16`` array, rounded to nearest,
    ties to even.
    """
    bits = tensor.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16)
    return bits.numpy().view(ml_dtypes.bfloat16)


def as_tensor(array: Tensor | Array) -> Tensor:
    """Return ``array`` as a torch tensor of the same data type.
    ``ml_dtypes.bfloat16`` is supported.
    """
    if isinstance(array, Tensor):
        return array
    # A read-only array is copied, because torch warns about read-only arrays.
    array = np.require(array, requirements=["C", "W"])
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
