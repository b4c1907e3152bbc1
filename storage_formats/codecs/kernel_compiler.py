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
    """A function that Numba compiles for one signature at its first call. The function runs without the GIL.

    The compiled code is cached on disk if the installation or the home directory is writeable.

    Args:
        function: Python function to compile. The function must return None.
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
    """Return a decorator that makes a function a `Kernel` with the given Numba types of its arguments."""
    return lambda function: Kernel(function, arguments)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a helper function that kernels call. Use it as a decorator."""
    compiled: Callable[..., Any] = _njit(function)
    return compiled


def input_array(number: Any) -> Any:
    """Return the Numba type of a read-only flat array of type `number`, C-contiguous, of any alignment."""
    return types.Array(number, 1, "C", readonly=True, aligned=False)


def output_array(number: Any) -> Any:
    """Return the Numba type of a writeable flat array of type `number`, C-contiguous, of any alignment."""
    return types.Array(number, 1, "C", aligned=False)
