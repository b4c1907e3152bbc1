"""Tokens of one precision, read from an index or converted in memory."""

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
        store: store to read from.
        codec: codec of the precision.
        simulated: True if the store holds another precision. Blocks are then encoded and decoded in memory.
    """

    store: TokenStore
    codec: Codec
    simulated: bool

    @property
    def precision(self) -> str:
        return self.codec.name

    @property
    def simulated_from(self) -> str | None:
        """Precision that blocks are converted from; None if the precision itself is stored."""
        return self.store.precision if self.simulated else None

    @property
    def bytes_per_image(self) -> int:
        """Length of a record in bytes, with its scales."""
        return self.codec.record_bytes

    def fetch(self, rows: NDArray[np.int64]) -> Blocks:
        """Return the blocks [k, m, d] of `rows` [k]."""
        distinct, which = np.unique(rows, return_inverse=True)
        blocks = self.store.fetch(distinct)
        if self.simulated:
            blocks = self.codec.decode(self.codec.encode(blocks))
        return blocks[which]


def token_sources(root: Path, names: Sequence[str], *, simulate: bool) -> list[TokenSource]:
    """Return the token sources of the precisions `names`, highest-fidelity first.

    Args:
        root: directory of the index.
        names: precisions; empty for all precisions of the index.
        simulate: allow precisions that the index does not hold, by converting tokens in memory.

    Raises:
        UsageError: a precision is not stored and `simulate` is False, or has a higher fidelity than every stored one.
    """
    spec = Manifest.load(root).spec
    stored = {name: codec(name, spec.block_shape) for name in spec.precisions}
    finest = max(stored.values(), key=lambda entry: entry.record_bytes)
    sources = []
    for name in dict.fromkeys(names or spec.precisions):
        requested = codec(name, spec.block_shape)
        if name not in stored and not simulate:
            raise UsageError(
                f"{root} does not hold the precision '{name}', only {', '.join(stored)}: add it with "
                "'edje-index quantize', or allow simulated precisions",
                parameter="simulate",
            )
        if name not in stored and requested.record_bytes > finest.record_bytes:
            raise UsageError(
                f"the precision '{name}' cannot be simulated from {root}, because the most accurate precision "
                f"there is {finest.name}"
            )
        source = TokenStore.open(root, name if name in stored else finest.name)
        sources.append(TokenSource(source, requested, simulated=name not in stored))
    return sorted(sources, key=lambda source: -source.bytes_per_image)
