"""Computes the final scores of the pools of an evaluation, for one precision at a time.

Each distinct pair of a caption and an image is scored once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edje_index.evaluation.protocol import EvaluationSet
from edje_index.evaluation.recall import Floats, Ints, Pools
from edje_index.progress import OnProgress
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.parts import Scorer
from edje_index.scoring.weights import (
    EMBEDDING,
    JOINT_PARTS,
    TEXT_TO_IMAGE,
    ScoreWeights,
)
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

    def fetch(self, rows: NDArray[np.int64]) -> Blocks:
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


def score_pools(
    scorer: Scorer,
    weights: Mapping[str, ScoreWeights],
    eval_set: EvaluationSet,
    pools: Mapping[str, Pools],
    source: TokenSource,
    *,
    pool_sizes: Sequence[int],
    on_progress: OnProgress,
) -> tuple[dict[str, dict[int, Floats]], int]:
    """Compute the final scores of all candidates in the pools.

    Returns:
        (final scores by direction and pool size, float32 [q, pool size]; number of
        distinct pairs that were scored)
    """
    pairs = {}
    for direction, pool in pools.items():
        if direction == TEXT_TO_IMAGE:
            captions = eval_set.query_captions[:, None]
            rows = eval_set.rows[pool.candidates]
        else:
            captions = pool.candidates
            rows = eval_set.query_rows[:, None]
        pairs[direction] = (captions << _KEY_SHIFT) | rows
    distinct = np.unique(
        np.concatenate([its_pairs.ravel() for its_pairs in pairs.values()])
    )
    used = {
        part
        for of_direction in weights.values()
        for part in FinalScore.of(of_direction).parts
    }
    joint_parts = [part for part in JOINT_PARTS if part in used]
    values: dict[str, dict[str, Floats]] = {
        direction: {EMBEDDING: pool.similarities} for direction, pool in pools.items()
    }
    scores = _score_pairs(
        scorer, joint_parts, eval_set.captions, distinct, source, on_progress
    )
    for direction, its_pairs in pairs.items():
        which = np.searchsorted(distinct, its_pairs)
        values[direction] |= {part: scores[part][which] for part in joint_parts}
    finals: dict[str, dict[int, Floats]] = {}
    for direction in pools:
        score = FinalScore.of(weights[direction])
        finals[direction] = {}
        for size in pool_sizes:
            parts = {
                part: part_values[:, :size]
                for part, part_values in values[direction].items()
            }
            finals[direction][size] = score.sum(parts)
    return finals, len(distinct) if joint_parts else 0


def _score_pairs(
    scorer: Scorer,
    parts: Sequence[str],
    captions: Sequence[str],
    pairs: Ints,
    source: TokenSource,
    on_progress: OnProgress,
) -> dict[str, Floats]:
    """Compute parts of the score for k distinct pairs in ascending order, float32 [k]
    each, by name.
    """
    scores = {part: np.empty(len(pairs), dtype=np.float32) for part in parts}
    if not parts:
        return scores
    positions, which = np.unique(pairs >> _KEY_SHIFT, return_inverse=True)
    lengths = np.array(
        [
            len(ids)
            for ids in scorer.joint.tokenizer.caption_ids(
                [captions[at] for at in positions]
            )
        ]
    )
    # Longest captions first: a lack of memory shows at once, and the estimate of the
    # remaining time is never too low. Captions of similar length share batches.
    order = np.argsort(-lengths[which], kind="stable")
    activity = f"pairs scored, {source.codec.name}"
    for start in range(0, len(order), CHUNK_PAIRS):
        on_progress(activity, start, len(order))
        chunk = order[start : start + CHUNK_PAIRS]
        texts = [captions[position] for position in pairs[chunk] >> _KEY_SHIFT]
        blocks = source.fetch(pairs[chunk] & ((1 << _KEY_SHIFT) - 1))
        values = scorer.parts(parts, texts, scorer.images(blocks))
        for part in parts:
            scores[part][chunk] = values[part]
    on_progress(activity, len(pairs), len(pairs))
    return scores
