"""Compilation of Numba kernels, with a cache on disk. Importing this module imports
Numba.

Each kernel is compiled for exactly one signature, and not for the types of each call.
The compiled code is therefore the same in every process, and processes that fill
Numba's cache at the same time write equal files.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

_Result = TypeVar("_Result")
types: Any = numba.types
_njit: Any = functools.partial(numba.njit, nogil=True, error_model="numpy")


def _compiled(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compile a function. The compiled code is cached on disk if the installation or
    the home directory is writeable.
    """
    try:
        return cast(Callable[..., Any], _njit(signature, cache=True)(function))
    except (RuntimeError, OSError):
        return cast(Callable[..., Any], _njit(signature)(function))


def _swap_modes(_: Any, modes: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        (modes,) = arguments
        if platform.machine() not in ("x86_64", "AMD64"):
            return modes
        slot = builder.alloca(modes.type)
        pointer = builder.bitcast(slot, ir.IntType(8).as_pointer())
        access = ir.FunctionType(ir.VoidType(), [pointer.type])
        declare = builder.module.declare_intrinsic
        builder.call(declare("llvm.x86.sse.stmxcsr", (), access), [pointer])
        old = builder.load(slot)
        builder.store(modes, slot)
        builder.call(declare("llvm.x86.sse.ldmxcsr", (), access), [pointer])
        return old

    return types.uint32(types.uint32), generate


_swap: Any = intrinsic(_swap_modes)
# The modes of a new thread: round to nearest, and keep subnormal numbers.
_DEFAULT_MODES = 0x1F80


def _set_modes(modes: Any) -> Any:
    return _swap(modes)


@functools.cache
def _mode_setter() -> Callable[[int], int]:
    return _compiled(_set_modes, types.uint32(types.uint32))


def with_default_modes(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Let a function compute with the default modes of floating-point numbers, so that
    its results do not depend on the modes of the caller's thread, such as
    `torch.set_flush_denormal(True)`. Use it as a decorator.
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> _Result:
        set_modes = _mode_setter()
        modes = set_modes(_DEFAULT_MODES)
        try:
            return function(*arguments)
        finally:
            set_modes(modes)

    return run


def kernel(*arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of a function that Numba compiles at its first call. The
    function runs without the GIL, and with the default modes of floating-point numbers.

    Args:
        arguments: Numba types of the arguments. The function must return None.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.cache
        def compiled() -> Callable[..., None]:
            return _compiled(function, types.void(*arguments))

        run = with_default_modes(lambda *values: compiled()(*values))
        return functools.wraps(function)(run)

    return decorate


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a helper function that kernels call. Use it as a decorator."""
    compiled: Callable[..., Any] = _njit(function)
    return compiled


fused: Callable[[Callable[..., Any]], Callable[..., Any]] = functools.partial(
    _njit, fastmath={"contract"}
)
"""Compiles a helper as `inlined` does, but LLVM may combine a multiplication and an
addition into one instruction, which rounds once.
"""

summing: Callable[[Callable[..., Any]], Callable[..., Any]] = functools.partial(
    _njit, fastmath={"reassoc", "contract"}
)
"""Compiles a helper as `fused` does, but LLVM may also change the order of sums, so
that it can vectorise them.
"""


def _prefer_wide_vectors(_: Any) -> Any:
    def generate(context: Any, builder: Any, *_: object) -> Any:
        # `add` of llvmlite (0.50) refuses attributes with values, so this line calls
        # the method of its base class `set`. llvmlite then writes the attribute
        # correctly. In a version where this call fails, the attribute is left out.
        with contextlib.suppress(TypeError):
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


prefer_wide_vectors: Any = intrinsic(_prefer_wide_vectors)
"""Lets LLVM use vectors of 512 bits in the kernel that calls this function. By default,
LLVM uses vectors of 256 bits, even on Intel processors that have vectors of 512 bits.
"""


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
