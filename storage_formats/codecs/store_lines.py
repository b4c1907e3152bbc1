"""Compiled non-temporal stores, which bypass the processor's cache. Importing this module imports Numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic
from numba.types import int64, void  # type: ignore[attr-defined]

from storage_formats.codecs.nontemporal import LINE_BYTES

_WORD = ir.IntType(64)
_LINE = ir.VectorType(_WORD, LINE_BYTES // 8)


@intrinsic
def store_lines(_: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes from address `source` to address `target` with non-temporal stores.

    `size` and `target` must be multiples of `LINE_BYTES`.
    """

    # A fence keeps later stores of the same thread from overtaking these stores (LLVM Language Reference, "fence").
    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        target, source, size = arguments
        before = builder.block
        loop, after = (builder.append_basic_block(name) for name in ("lines", "stored"))
        builder.cbranch(builder.icmp_unsigned(">", size, _WORD(0)), loop, after)
        builder.position_at_end(loop)
        offset = builder.phi(_WORD)
        offset.add_incoming(_WORD(0), before)
        line = builder.load(builder.inttoptr(builder.add(source, offset), _LINE.as_pointer()), align=1)
        stored = builder.store(line, builder.inttoptr(builder.add(target, offset), _LINE.as_pointer()), LINE_BYTES)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        following = builder.add(offset, _WORD(LINE_BYTES))
        offset.add_incoming(following, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, size), loop, after)
        builder.position_at_end(after)
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return void(int64, int64, int64), generate
