"""The tokens of one precision: as an index stores them, or as it would store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Blocks, Codec, codec
from storage_formats.errors import UsageError
from storage_formats.format.manifest import Manifest
from storage_formats.token_store import TokenStore


@dataclass(frozen=True)
class TokenSource:
    """Tokens of one precision.

    Attributes:
        store: where they are read.
        codec: of the precision.
        simulated: the store holds another precision; blocks are encoded and decoded in memory.
    """

    store: TokenStore
    codec: Codec
    simulated: bool

    @property
    def precision(self) -> str:
        return self.codec.name

    @property
    def simulated_from(self) -> str | None:
        """The stored precision that blocks are made from, where they are not stored in this one."""
        return self.store.precision if self.simulated else None

    @property
    def bytes_per_image(self) -> int:
        """Length of a record, scales included."""
        return self.codec.record_bytes

    def fetch(self, rows: NDArray[np.int64]) -> Blocks:
        """Blocks [k, m, d] of `rows` [k], each read and converted once however often it is asked for."""
        distinct, which = np.unique(rows, return_inverse=True)
        blocks = self.store.fetch(distinct)
        if self.simulated:
            blocks = self.codec.decode(self.codec.encode(blocks))
        return blocks[which]


def token_sources(root: Path, names: Sequence[str], *, simulate: bool) -> list[TokenSource]:
    """Sources of the precisions `names`, all that the index holds where there are none, the longest records first.

    Raises:
        UsageError: a precision is not stored and not to be simulated, or what is stored is coarser than it.
    """
    spec = Manifest.load(root).spec
    held = {name: codec(name, spec.block_shape) for name in spec.precisions}
    finest = max(held.values(), key=lambda each: each.record_bytes)
    sources = []
    for name in dict.fromkeys(names or spec.precisions):
        wanted = codec(name, spec.block_shape)
        if name not in held and not simulate:
            raise UsageError(
                f"{root} does not hold precision '{name}' (it holds {', '.join(held)}): add it with "
                f"'edje-index quantize {root} --to {name}', or give --simulate to convert in memory"
            )
        if name not in held and wanted.record_bytes > finest.record_bytes:
            raise UsageError(f"'{name}' cannot be simulated: the finest that {root} holds is {finest.name}")
        stored = name if name in held else finest.name
        sources.append(TokenSource(TokenStore.open(root, stored), wanted, simulated=name not in held))
    return sorted(sources, key=lambda source: -source.bytes_per_image)
