"""Computes one part of the score for many pairs of a caption and an image. Each distinct pair is scored once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edje_index.evaluation.score_cache import Floats, Ints, ScoreCache
from edje_index.evaluation.token_sources import TokenSource
from edje_index.models.joint_inputs import JointTokenizer
from edje_index.progress import OnProgress
from edje_index.scoring.parts import Pairs, Part

CHUNK_PAIRS = 512  # 25 MB of 64 x 384 bfloat16 blocks
_KEY_SHIFT = 40  # a pair is one integer: caption position in the high bits, row id (below 2^40) in the low bits


@dataclass(frozen=True)
class PairScorer:
    """Computes one part of the score for many pairs.

    Attributes:
        part: part of the score to compute.
        name: name of the part, for progress messages.
        source: source of the tokens.
        captions: all captions of the evaluation.
        tokenizer: tokenizer of the joint encoder. It measures the length of captions.
        cache: scores of earlier runs. They are not computed again.
    """

    part: Part
    name: str
    source: TokenSource
    captions: Sequence[str]
    tokenizer: JointTokenizer
    cache: ScoreCache

    def score(self, captions: Ints, rows: Ints, on_progress: OnProgress) -> Floats:
        """Return the scores of k pairs, float32 [k].

        Args:
            captions: index in `self.captions` of the caption of each pair, int64 [k].
            rows: row id of the image of each pair, int64 [k].
            on_progress: called with the number of scored pairs.
        """
        pairs = pack(captions, rows)
        distinct = np.unique(pairs)
        cached, scores = self.cache.load()
        missing = np.setdiff1d(distinct, cached, assume_unique=True)
        activity = f"pairs scored, {self.name}, {self.source.precision}"
        scored = [(cached, scores)]
        try:
            for done, chunk in self._chunks(missing):
                on_progress(activity, len(distinct) - len(missing) + done, len(distinct))
                scored.append((chunk, self._score_chunk(chunk)))
                self.cache.add(*scored[-1])
        finally:
            self.cache.save()
        on_progress(activity, len(distinct), len(distinct))
        return _look_up(scored, pairs)

    def _chunks(self, pairs: Ints) -> Iterator[tuple[int, Ints]]:
        """Split `pairs` into chunks with captions of similar length. Yield (number of earlier pairs, chunk)."""
        if not len(pairs):
            return
        positions, which = np.unique(pairs >> _KEY_SHIFT, return_inverse=True)
        texts = [self.captions[position] for position in positions]
        lengths = np.array([len(ids) for ids in self.tokenizer.caption_ids(texts)])
        # Longest first: a lack of memory shows at once, and the estimate of the remaining time is never too low.
        ordered = pairs[np.argsort(-lengths[which], kind="stable")]
        for start in range(0, len(ordered), CHUNK_PAIRS):
            yield start, ordered[start : start + CHUNK_PAIRS]

    def _score_chunk(self, pairs: Ints) -> Floats:
        positions, rows = unpack(pairs)
        return self.part.of(Pairs([self.captions[position] for position in positions], self.source.fetch(rows)))


def pack(captions: Ints, rows: Ints) -> Ints:
    """Pack each pair into one integer. The low 40 bits are the row id, and the high bits are the caption position."""
    packed: Ints = (captions << _KEY_SHIFT) | rows
    return packed


def unpack(pairs: Ints) -> tuple[Ints, Ints]:
    """Return the caption positions and the row ids of packed pairs."""
    return pairs >> _KEY_SHIFT, pairs & ((1 << _KEY_SHIFT) - 1)


def _look_up(scored: Sequence[tuple[Ints, Floats]], pairs: Ints) -> Floats:
    keys = np.concatenate([pairs for pairs, _ in scored])
    values = np.concatenate([scores for _, scores in scored])
    order = np.argsort(keys, kind="stable")
    scores: Floats = values[order][np.searchsorted(keys[order], pairs)]
    return scores
