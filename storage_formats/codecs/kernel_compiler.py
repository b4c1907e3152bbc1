"""Compilation of Numba kernels, with a cache on disk. Importing this module imports
Numba.

Each kernel is compiled for exactly one signature. Therefore, processes that fill
Numba's cache at the same time write equal files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numba
from numba.extending import intrinsic

types: Any = numba.types
_njit: Any = functools.partial(numba.njit, nogil=True, error_model="numpy")


def kernel(*arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of a function that Numba compiles at its first call. The
    function runs without the GIL.

    The compiled code is cached on disk if the installation or the home directory is
    writeable.

    Args:
        arguments: Numba types of the arguments. The function must return None.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.cache
        def compiled() -> Callable[..., None]:
            compiler = _njit(types.void(*arguments), cache=True)
            try:
                return cast(Callable[..., None], compiler(function))
            except (RuntimeError, OSError):
                # without a cache, because neither the installation nor the home
                # directory is writeable
                return cast(
                    Callable[..., None], _njit(types.void(*arguments))(function)
                )

        return functools.wraps(function)(lambda *values: compiled()(*values))

    return decorate


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a helper function that kernels call. Use it as a decorator."""
    compiled: Callable[..., Any] = _njit(function)
    return compiled


fused: Callable[[Callable[..., Any]], Callable[..., Any]] = functools.partial(
    _njit, fastmath={"contract"}
)
"""Compiles a helper like `inlined`, but an instruction may multiply and add."""

summing: Callable[[Callable[..., Any]], Callable[..., Any]] = functools.partial(
    _njit, fastmath={"reassoc", "contract"}
)
"""Compiles a helper like `inlined`, but with sums in any order, so that LLVM can
vectorise them.
"""


unordered: Callable[[Callable[..., Any]], Callable[..., Any]] = functools.partial(
    _njit, fastmath={"nnan", "nsz"}
)
"""Compiles a helper like `inlined`, for numbers that are not NaN, so that LLVM can
vectorise comparisons.
"""


def _count_ones(_: Any, word: Any) -> Any:
    return types.uint64(
        types.uint64
    ), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


count_ones: Any = intrinsic(_count_ones)
"""Returns the number of bits that are 1 in an uint64."""


def input_array(number: Any) -> Any:
    """Return the Numba type of a read-only flat array of type `number`,
    C-contiguous, of any alignment.
    """
    return types.Array(number, 1, "C", readonly=True, aligned=False)


def output_array(number: Any) -> Any:
    """Return the Numba type of a writeable flat array of type `number`,
    C-contiguous, of any alignment.
    """
    return types.Array(number, 1, "C", aligned=False)
