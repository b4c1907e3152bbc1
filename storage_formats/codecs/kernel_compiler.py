"""Compilation of Numba kernels, with a cache on disk. Importing this module imports Numba.

Each kernel has exactly one signature. Processes that fill Numba's cache at the same time therefore write equal files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba

types: Any = numba.types
_njit: Any = functools.partial(numba.njit, nogil=True, error_model="numpy")


class Kernel:
    """A function that Numba compiles for one signature at its first call. It runs without the GIL.

    The compiled code is cached on disk if the installation or the home directory is writeable.

    Args:
        function: Python function to compile. It returns None.
        arguments: Numba types of the arguments of `function`.
    """

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._signature = types.void(*arguments)

    def __call__(self, *arguments: Any) -> None:
        self._compiled(*arguments)

    @functools.cached_property
    def _compiled(self) -> Callable[..., None]:
        try:
            return self._compile(cache=True)
        except (RuntimeError, OSError):  # neither the installation nor the home directory is writeable
            return self._compile(cache=False)

    def _compile(self, *, cache: bool) -> Callable[..., None]:
        compiled: Callable[..., None] = _njit(self._signature, cache=cache)(self._function)
        return compiled


def kernel(*arguments: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Return a decorator that turns a function into a `Kernel` with the given Numba argument types."""
    return lambda function: Kernel(function, arguments)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that compiles a helper function of kernels."""
    compiled: Callable[..., Any] = _njit(function)
    return compiled


def input_array(number: Any) -> Any:
    """Return the Numba type of a flat C-contiguous array of `number` that a kernel reads. Any alignment is allowed."""
    return types.Array(number, 1, "C", readonly=True, aligned=False)


def output_array(number: Any) -> Any:
    """Return the Numba type of a flat C-contiguous array of `number` that a kernel writes. Any alignment is allowed."""
    return types.Array(number, 1, "C", aligned=False)
