"""Compiled loops that copy memory. Importing this module imports Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic
from numpy.typing import NDArray

from storage_formats.codecs.kernel_compiler import Kernel, types
from storage_formats.codecs.store_lines import store_lines


@intrinsic
def _memcpy(_: Any, target: Any, source: Any, size: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(64)
        function_type = ir.FunctionType(pointer, [pointer, pointer, word])
        function = builder.module.globals.get("memcpy") or ir.Function(builder.module, function_type, "memcpy")
        builder.call(function, [*(builder.inttoptr(address, pointer) for address in arguments[:2]), arguments[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _copy(sources: NDArray[np.int64], targets: NDArray[np.int64], size: int, start: int, stop: int) -> None:
    for index in range(start, stop):
        _memcpy(targets[index], sources[index], size)  # type: ignore[call-arg]


def _copy_nontemporal(sources: NDArray[np.int64], targets: NDArray[np.int64], size: int, start: int, stop: int) -> None:
    for index in range(start, stop):
        store_lines(targets[index], sources[index], size)  # type: ignore[call-arg]


_ADDRESSES = types.Array(types.int64, 1, "C", readonly=True)
_ARGUMENTS = (_ADDRESSES, _ADDRESSES, types.int64, types.int64, types.int64)
copy_pieces = Kernel(_copy, _ARGUMENTS)
"""(sources, targets, size, start, stop): copy `size` bytes from each address sources[i] to targets[i], for i in
[start, stop). Releases the GIL."""
copy_pieces_nontemporal = Kernel(_copy_nontemporal, _ARGUMENTS)
"""Like `copy_pieces`, with non-temporal stores. `size` and all targets are multiples of `nontemporal.LINE_BYTES`."""
