"""Reads tokens of a precision from an index, or converts stored tokens to this precision in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Blocks, Codec, codec
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.token_store import TokenStore


@dataclass(frozen=True)
class TokenSource:
    """Reads or converts the tokens of one precision.

    Attributes:
        store: store to read from.
        codec: codec of the precision.
    """

    store: TokenStore
    codec: Codec

    @property
    def simulated_from(self) -> str | None:
        """Stored precision that is converted in memory; None if no conversion is necessary."""
        return None if self.store.precision == self.codec.name else self.store.precision

    def fetch(self, rows: NDArray[np.int64]) -> Blocks:
        """Return the blocks of `rows` [k], of shape [k, m, d]."""
        distinct, which = np.unique(rows, return_inverse=True)
        return self.convert(self.store.fetch(distinct))[which]

    def convert(self, blocks: Blocks) -> Blocks:
        """Return `blocks` of the store [k, m, d] in the precision of this source."""
        return blocks if self.simulated_from is None else self.codec.decode(self.codec.encode(blocks))


def token_sources(index: CommittedIndex, names: Sequence[str]) -> list[TokenSource]:
    """Return the token sources of the precisions `names`, highest-fidelity first.

    A precision that is not stored is converted in memory from the highest-fidelity precision stored.

    Args:
        index: an open index.
        names: precisions; empty for all precisions of the index.

    Raises:
        UsageError: a precision is unknown, or has a higher fidelity than all stored precisions.
    """
    spec = index.manifest.spec
    finest = max((codec(name, spec.block_shape) for name in spec.precisions), key=lambda entry: entry.record_bytes)
    sources = []
    for name in dict.fromkeys(names or spec.precisions):
        requested = codec(name, spec.block_shape)
        if name not in spec.precisions and requested.record_bytes > finest.record_bytes:
            raise UsageError(
                f"the precision '{name}' cannot be simulated from {index.root}, because the most accurate stored "
                f"precision is {finest.name}; choose a less accurate precision"
            )
        stored = name if name in spec.precisions else finest.name
        sources.append(TokenSource(TokenStore(index, stored), requested))
    return sorted(sources, key=lambda source: -source.codec.record_bytes)
