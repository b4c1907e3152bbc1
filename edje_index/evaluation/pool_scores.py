"""Computes the parts of the final score for the pools of many queries, with the tokens
of one precision at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from edje_index.progress import OnProgress
from edje_index.scoring.parts import Scorer
from storage_formats.arrays import Floats, Ints
from storage_formats.codecs import Blocks, Codec, codec, finest
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.token_store import TokenStore
from storage_formats.writing.conversion import choose_offset

# 25 MB of 64 x 384 bfloat16 blocks
CHUNK_PAIRS = 512
# a pair is one integer: caption position in the high bits, row id (below 2^40) in the
# low bits
_KEY_SHIFT = 40


@dataclass(frozen=True)
class TokenSource:
    """Reads or converts the tokens of one precision."""

    store: TokenStore
    codec: Codec

    @property
    def simulated_from(self) -> str | None:
        """Stored precision that is converted in memory; None if no conversion is
        necessary.
        """
        return None if self.store.precision == self.codec.name else self.store.precision

    def fetch(self, rows: Ints) -> Blocks:
        """Return the blocks of `rows` [k], of shape [k, m, d]."""
        distinct, which = np.unique(rows, return_inverse=True)
        blocks = self.store.fetch(distinct)
        if self.simulated_from is not None:
            blocks = self.codec.decode(self.codec.encode(blocks))
        return blocks[which]


def token_sources(
    index: CommittedIndex, names: Sequence[str], source: str | None = None
) -> list[TokenSource]:
    """Return the token sources of the precisions `names`, highest-fidelity first.

    A precision that is not stored is converted in memory from `source`, as `quantize`
    would convert it.

    Args:
        names: precisions; empty for all precisions of the index.
        source: a precision of the index; None for that of the highest fidelity.

    Raises:
        UsageError: a precision is unknown, or has a higher fidelity than `source`.
    """
    spec = index.manifest.spec
    held = codec(source or finest(spec.precisions), spec.block_shape)
    requested = list(dict.fromkeys(names or spec.precisions))
    missing = [name for name in requested if name not in spec.precisions]
    for name in missing:
        if codec(name, spec.block_shape).record_bytes > held.record_bytes:
            raise UsageError(
                f"the precision '{name}' cannot be simulated from {index.root}, because"
                f" the most accurate stored precision is {held.name}; choose a less"
                " accurate precision"
            )
    offset = block = None
    if missing:
        offset, block = choose_offset(index, held.name, missing)
    sources = []
    for name in requested:
        if name in missing:
            has_offset = block is not None and name in block.precisions
            used = offset if has_offset else None
            entry = codec(name, spec.block_shape, used)
            sources.append(TokenSource(TokenStore(index, held.name), entry))
        else:
            store = TokenStore(index, name)
            sources.append(TokenSource(store, codec(name, spec.block_shape)))
    return sorted(sources, key=lambda source: -source.codec.record_bytes)


def score_pairs(
    scorer: Scorer,
    parts: Sequence[str],
    captions: Sequence[str],
    pairs: Sequence[tuple[Ints, Ints]],
    fetch: Callable[[Ints], Blocks | Tensor],
    on_progress: OnProgress,
    activity: str = "pairs scored",
) -> list[dict[str, Floats]]:
    """Compute parts of the final score for several arrays of pairs. A pair that occurs
    several times is scored once.

    Args:
        parts: names in `JOINT_PARTS`.
        pairs: for each array, the position in `captions` and the row id of each pair,
            int64 of shapes that broadcast.
        fetch: returns the blocks of row ids [k], which may repeat, [k, m, d].

    Returns:
        For each array, the values of each part by name, float32 of its shape.
    """
    keys = [(positions << _KEY_SHIFT) | rows for positions, rows in pairs]
    if not parts:
        return [{} for _ in keys]
    distinct = np.unique(np.concatenate([each.ravel() for each in keys]))
    lengths = np.array(list(map(len, scorer.joint.tokenizer.caption_ids(captions))))
    # Longest captions first: a lack of memory shows at once, and the estimate of the
    # remaining time is never too low. Captions of similar length share batches.
    order = np.argsort(-lengths[distinct >> _KEY_SHIFT], kind="stable")
    scores = {part: np.empty(len(distinct), dtype=np.float32) for part in parts}
    for start in range(0, len(order), CHUNK_PAIRS):
        on_progress(activity, start, len(order))
        chunk = order[start : start + CHUNK_PAIRS]
        texts = [captions[position] for position in distinct[chunk] >> _KEY_SHIFT]
        blocks = fetch(distinct[chunk] & ((1 << _KEY_SHIFT) - 1))
        for part, values in scorer.parts(parts, texts, scorer.images(blocks)).items():
            scores[part][chunk] = values
    on_progress(activity, len(order), len(order))
    places = [np.searchsorted(distinct, each) for each in keys]
    return [
        {part: values[place] for part, values in scores.items()} for place in places
    ]
