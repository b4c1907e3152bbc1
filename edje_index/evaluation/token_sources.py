"""Reads tokens of a precision from an index, or converts tokens to this precision in memory."""

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
    """Reads or converts the tokens of one precision.

    Attributes:
        store: store to read from.
        codec: codec of the precision.
        simulated: True if the store contains another precision. Blocks are then converted in memory.
    """

    store: TokenStore
    codec: Codec
    simulated: bool

    @property
    def precision(self) -> str:
        return self.codec.name

    @property
    def simulated_from(self) -> str | None:
        """Stored precision that is converted in memory; None if no conversion is necessary."""
        return self.store.precision if self.simulated else None

    @property
    def bytes_per_image(self) -> int:
        """Length of a record in bytes, including scales."""
        return self.codec.record_bytes

    def fetch(self, rows: NDArray[np.int64]) -> Blocks:
        """Return the blocks of `rows` [k], of shape [k, m, d]."""
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
        simulate: allow precisions that are not stored in the index. Tokens are then converted in memory.

    Raises:
        UsageError: a precision is not stored and `simulate` is False, or a precision has a higher fidelity than all
            stored precisions.
    """
    spec = Manifest.load(root).spec
    stored = {name: codec(name, spec.block_shape) for name in spec.precisions}
    finest = max(stored.values(), key=lambda entry: entry.record_bytes)
    sources = []
    for name in dict.fromkeys(names or spec.precisions):
        requested = codec(name, spec.block_shape)
        if name not in stored and not simulate:
            raise UsageError(
                f"{root} does not have precision '{name}', only {', '.join(stored)}: add this precision with "
                "'edje-index quantize', or allow simulated precisions",
                parameter="simulate",
            )
        if name not in stored and requested.record_bytes > finest.record_bytes:
            raise UsageError(
                f"the precision '{name}' cannot be simulated from {root}, because the most accurate stored precision "
                f"is {finest.name}; choose a less accurate precision"
            )
        source = TokenStore.open(root, name if name in stored else finest.name)
        sources.append(TokenSource(source, requested, simulated=name not in stored))
    return sorted(sources, key=lambda source: -source.bytes_per_image)
