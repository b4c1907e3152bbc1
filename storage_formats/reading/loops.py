"""Compiled loops that copy records, and that compute their CRC-32C.

The CRC-32C instruction of the processor (SSE 4.2) has a latency of three cycles. The
loops therefore process three records at a time, so that an instruction for another
record can start in each cycle. Copies of records outside the processor's cache are
faster this way, too. Importing this module imports Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import config, extending
from numpy.typing import NDArray

from storage_formats.codecs.kernel_compiler import inlined, kernel, types

# The type stub of `intrinsic` does not know that Numba passes the first argument.
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = extending.intrinsic
Addresses: TypeAlias = NDArray[np.int64]
Checksums: TypeAlias = NDArray[np.uint32]

_WORD = ir.IntType(64)
_BYTE = ir.IntType(8)
_LINE = ir.VectorType(_WORD, 8)
_ONES = np.uint64(0xFFFFFFFF)
# Distance between the bytes that are read and the bytes that are prefetched. It was
# chosen by measurements with records outside the processor's cache (docs/lab).
_AHEAD_BYTES = 2048


def has_crc_instruction() -> bool:
    """Return True if the processor has a CRC-32C instruction that Numba may use."""
    # with these settings, Numba compiles for another processor
    if config.CPU_NAME or config.CPU_FEATURES:  # type: ignore[attr-defined]
        return False
    return bool(binding.get_host_cpu_features().get("sse4.2"))


def _crc_instruction(name: str, value: ir.IntType) -> Any:
    def add(_: Any, crc: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            crc, address = arguments
            function_type = ir.FunctionType(_WORD, [_WORD, value])
            function = builder.module.declare_intrinsic(name, (), function_type)
            pointer = builder.inttoptr(address, value.as_pointer())
            return builder.call(function, [crc, builder.load(pointer, align=1)])

        return types.uint64(types.uint64, types.int64), generate

    return intrinsic(add)


_crc_word = _crc_instruction("llvm.x86.sse42.crc32.64.64", _WORD)
_crc_byte = _crc_instruction("llvm.x86.sse42.crc32.64.8", _BYTE)


def _line_copier(nontemporal: bool) -> Any:
    def copy_lines(_: Any, targets: Any, sources: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            targets, sources = (
                [
                    builder.inttoptr(
                        builder.extract_value(each, lane), _LINE.as_pointer()
                    )
                    for lane in range(3)
                ]
                for each in arguments
            )
            # All loads come before the stores. A load waits for an earlier store to an
            # address with the same lowest 12 bits. Such addresses are frequent here,
            # because records start at page boundaries in both memories. Alternating
            # loads and stores take twice as long.
            lines = [builder.load(source, align=1) for source in sources]
            for line, target in zip(lines, targets, strict=True):
                stored = builder.store(line, target, align=64 if nontemporal else 1)
                if nontemporal:
                    stored.set_metadata(
                        "nontemporal", builder.module.add_metadata([ir.IntType(32)(1)])
                    )
            return context.get_dummy_value()

        addresses = types.UniTuple(types.int64, 3)
        return types.void(addresses, addresses), generate

    return intrinsic(copy_lines)


@intrinsic
def _fence(_: Any) -> Any:
    """Make the earlier non-temporal stores of this thread visible before the later
    stores of this thread.
    """

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _prefetch(_: Any, address: Any) -> Any:
    """Start to load the line at `address` into the processor's cache. An invalid
    address does no harm.
    """

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        pointer = _BYTE.as_pointer()
        flag = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer], function_type
        )
        read = flag(0)
        keep = flag(3)
        data = flag(1)
        builder.call(
            function, [builder.inttoptr(arguments[0], pointer), read, keep, data]
        )
        return context.get_dummy_value()

    return types.void(types.int64), generate


_copy_lines = _line_copier(nontemporal=False)
_copy_lines_nontemporal = _line_copier(nontemporal=True)


@inlined
def _crc_line(crc: Any, address: Any) -> Any:
    for offset in range(0, 64, 8):
        crc = _crc_word(crc, address + offset)
    return crc


@inlined
def _crc_rest(crc: Any, address: Any, stop: Any) -> Any:
    while address + 8 <= stop:
        crc = _crc_word(crc, address)
        address += 8
    while address < stop:
        crc = _crc_byte(crc, address)
        address += 1
    return np.uint32(crc ^ _ONES)


_ADDRESS_ARRAY = types.Array(types.int64, 1, "C", readonly=True)
_CHECKSUM_ARRAY = types.Array(types.uint32, 1, "C")


@kernel(_ADDRESS_ARRAY, _ADDRESS_ARRAY, types.int64, types.boolean)
def copy_records(
    sources: Addresses, targets: Addresses, size: int, bypasses: bool
) -> None:
    """Copy the `size` bytes at each address in `sources` [k] to the address in
    `targets` [k]. `size` must be a multiple of 64.

    Args:
        bypasses: whether the stores bypass the processor's cache. The addresses in
            `targets` must be multiples of 64 then.
    """
    last = len(sources) - 1
    # At the end, the last record may be copied up to three times.
    for i in range(0, len(sources), 3):
        j = min(i + 1, last)
        k = min(i + 2, last)
        for offset in range(0, size, 64):
            to = (targets[i] + offset, targets[j] + offset, targets[k] + offset)
            of = (sources[i] + offset, sources[j] + offset, sources[k] + offset)
            for address in of:
                _prefetch(address + _AHEAD_BYTES)
            if bypasses:
                _copy_lines_nontemporal(to, of)
            else:
                _copy_lines(to, of)
    if bypasses:
        _fence()


@kernel(_ADDRESS_ARRAY, types.int64, _CHECKSUM_ARRAY)
def checksum_records(sources: Addresses, size: int, checksums: Checksums) -> None:
    """Write the CRC-32C of the `size` bytes at each address in `sources` [k] to
    `checksums` [k].
    """
    whole = size - size % 64
    last = len(sources) - 1
    # At the end, the last record may be processed up to three times.
    for i in range(0, len(sources), 3):
        j = min(i + 1, last)
        k = min(i + 2, last)
        a = sources[i]
        b = sources[j]
        c = sources[k]
        x = y = z = _ONES
        for offset in range(0, whole, 64):
            for address in (a, b, c):
                _prefetch(address + offset + _AHEAD_BYTES)
            x = _crc_line(x, a + offset)
            y = _crc_line(y, b + offset)
            z = _crc_line(z, c + offset)
        checksums[i] = _crc_rest(x, a + whole, a + size)
        checksums[j] = _crc_rest(y, b + whole, b + size)
        checksums[k] = _crc_rest(z, c + whole, c + size)
