"""Computes the final scores of the pools of an evaluation, for one precision at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edje_index.evaluation.pair_scores import PairScorer, pack
from edje_index.evaluation.pools import Pools
from edje_index.evaluation.protocol import EvaluationSet
from edje_index.evaluation.recall import Bools, Floats, Ints
from edje_index.evaluation.score_cache import ScoreCache
from edje_index.evaluation.token_sources import TokenSource
from edje_index.progress import OnProgress
from edje_index.scoring.cascade import Cascade
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.parts import Pairs, reads_tokens
from edje_index.scoring.weights import EMBEDDING, HUBNESS, JOINT_PARTS, LOGIT, TEXT_TO_IMAGE, ScoreWeights

if TYPE_CHECKING:
    from edje_index.search.search_model import SearchModel

_HUBNESS_BATCH = 256  # candidates: 13 MB of 64 x 384 bfloat16 blocks


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of the captions, float32 [c, e], and of the candidate images, float32 [r, e]."""

    texts: Floats
    images: Floats


@dataclass(frozen=True)
class PoolScorer:
    """Computes the final scores of all candidates in the pools.

    Attributes:
        model: search model of the bundle.
        weights: weights of the final score by direction.
        eval_set: queries and candidates.
        embeddings: embeddings of the captions and of the candidate images.
        pools: pools by direction.
        pool_sizes: numbers of candidates to re-rank.
        joint_pool: number of candidates per query that the joint encoder scores; None for all.
        cache: directory of cached scores; None for no cache.
        index_key: JSON value that identifies the index in the cache.
    """

    model: SearchModel
    weights: Mapping[str, ScoreWeights]
    eval_set: EvaluationSet
    embeddings: Embeddings
    pools: Mapping[str, Pools]
    pool_sizes: Sequence[int]
    joint_pool: int | None
    cache: Path | None
    index_key: Any

    @property
    def reads_tokens(self) -> bool:
        """True if the final score of at least one direction needs the tokens."""
        return any(reads_tokens(FinalScore.of(w).parts, direction) for direction, w in self.weights.items())

    @property
    def joint_parts(self) -> list[str]:
        """Names of the parts that are computed per pair of caption and image, and have a weight in some direction."""
        used = {part for weights in self.weights.values() for part in FinalScore.of(weights).parts}
        return [part for part in JOINT_PARTS if part in used]

    def count_pairs(self) -> int:
        """Return the number of distinct pairs to score with the tokens of one source."""
        return len(np.unique(pack(*self._all_pairs()))) if self.joint_parts else 0

    def score(self, source: TokenSource, on_progress: OnProgress) -> dict[str, dict[int, Floats]]:
        """Return the final scores with the tokens of `source`, float32 [q, pool size] by direction and pool size."""
        values: dict[str, dict[str, Floats]] = {
            direction: {EMBEDDING: pools.similarities} for direction, pools in self.pools.items()
        }
        every_pair = {direction: np.ones(pools.candidates.shape, np.bool_) for direction, pools in self.pools.items()}
        needed_pairs = {part: every_pair for part in self.joint_parts if part != LOGIT or self.joint_pool is None}
        for part, needed in needed_pairs.items():
            self._add_joint_part(values, part, needed, source=source, on_progress=on_progress)
        for direction, parts in values.items():
            if self.weights[direction].hubness:
                parts[HUBNESS] = self._hubness(direction, source)
        if self.joint_pool is not None:
            needed = self._pairs_of_joint_encoder(values, self.joint_pool)
            self._add_joint_part(values, LOGIT, needed, source=source, on_progress=on_progress)
        return {
            direction: {pool: self._final(direction, parts, pool) for pool in self.pool_sizes}
            for direction, parts in values.items()
        }

    def _final(self, direction: str, parts: Mapping[str, Floats], pool: int) -> Floats:
        """Return the final scores of the first `pool` candidates, float32 [q, pool]."""
        score = FinalScore.of(self.weights[direction])
        parts = {part: values[:, :pool] for part, values in parts.items()}
        if self.joint_pool is not None:
            cascade = Cascade(score, self.joint_pool)
            chosen = cascade.chosen(parts, self.pools[direction].candidates[:, :pool])
            logits = np.where(chosen, parts[LOGIT], np.float32(np.nan))  # other pool sizes may need other logits
            parts = cascade.with_every_logit({**parts, LOGIT: logits})
        total: Floats = score.sum(parts)
        return total

    def _pairs_of_joint_encoder(self, values: Mapping[str, Mapping[str, Floats]], joint_pool: int) -> dict[str, Bools]:
        """Return the pairs that the joint encoder scores for any of the pool sizes, bool [q, p] by direction."""
        masks = {}
        for direction, parts in values.items():
            cascade = Cascade(FinalScore.of(self.weights[direction]), joint_pool)
            candidates = self.pools[direction].candidates
            masks[direction] = np.zeros(candidates.shape, dtype=np.bool_)
            for pool in self.pool_sizes:
                first = {part: part_values[:, :pool] for part, part_values in parts.items()}
                masks[direction][:, :pool] |= cascade.chosen(first, candidates[:, :pool])
        return masks

    def _add_joint_part(
        self,
        values: Mapping[str, dict[str, Floats]],
        part: str,
        needed: Mapping[str, Bools],
        *,
        source: TokenSource,
        on_progress: OnProgress,
    ) -> None:
        """Compute one part of the score for the `needed` pairs, and store it in ``values[direction][part]``.

        The value is NaN for the other pairs. A pair that is needed in both directions is scored once.
        """
        direction = next(iter(self.pools))
        scorer = PairScorer(
            part=self.model.parts(direction, self.weights[direction])[part],
            name=part,
            source=source,
            captions=self.eval_set.captions,
            tokenizer=self.model.joint.tokenizer,
            cache=ScoreCache(self.cache, self._cache_key(part, source)),
        )
        captions, rows = self._all_pairs()
        mask = np.concatenate([needed[direction].ravel() for direction in self.pools])
        scores = np.full(len(mask), np.nan, dtype=np.float32)
        scores[mask] = scorer.score(captions[mask], rows[mask], on_progress)
        ends = np.cumsum([pools.candidates.size for pools in self.pools.values()])[:-1]
        for (direction, pools), flat in zip(self.pools.items(), np.split(scores, ends), strict=True):
            values[direction][part] = flat.reshape(pools.candidates.shape)

    def _all_pairs(self) -> tuple[Ints, Ints]:
        pairs = [self._pairs(direction, pools) for direction, pools in self.pools.items()]
        return np.concatenate([captions for captions, _ in pairs]), np.concatenate([rows for _, rows in pairs])

    def _pairs(self, direction: str, pools: Pools) -> tuple[Ints, Ints]:
        size = pools.candidates.shape[1]
        if direction == TEXT_TO_IMAGE:
            return np.repeat(self.eval_set.query_captions, size), self.eval_set.rows[pools.candidates].ravel()
        return pools.candidates.ravel(), np.repeat(self.eval_set.query_rows, size)

    def _hubness(self, direction: str, source: TokenSource) -> Floats:
        """Compute the hubness correction, float32 [q, p]. Each distinct candidate is computed once."""
        part = self.model.parts(direction, self.weights[direction])[HUBNESS]

        def images(positions: Ints) -> Pairs:
            tokens = source.fetch(self.eval_set.rows[positions])
            return Pairs(tokens=tokens, candidate_embeddings=self.embeddings.images[positions])

        def captions(positions: Ints) -> Pairs:
            texts = [self.eval_set.captions[position] for position in positions]
            return Pairs(texts, candidate_embeddings=self.embeddings.texts[positions])

        pairs_of = images if direction == TEXT_TO_IMAGE else captions
        return _each_once(self.pools[direction].candidates, lambda positions: part.of(pairs_of(positions)))

    def _cache_key(self, part: str, source: TokenSource) -> dict[str, Any]:
        return {
            "bundle": self.model.fingerprint,
            "index": self.index_key,
            "precision": [source.precision, source.simulated_from],
            "captions": hashlib.sha256(json.dumps(self.eval_set.captions).encode()).hexdigest(),
            "dtype": dtype_name(self.model),
            "part": part,
        }


def dtype_name(model: SearchModel) -> str:
    """Return the name of the data type of matrix products in the joint encoder."""
    return str(model.joint.compute_dtype).removeprefix("torch.")


def _each_once(candidates: Ints, score: Callable[[Ints], Floats]) -> Floats:
    positions, which = np.unique(candidates, return_inverse=True)
    starts = range(0, len(positions), _HUBNESS_BATCH)
    scores: Floats = np.concatenate([score(positions[start : start + _HUBNESS_BATCH]) for start in starts])
    return scores[which.reshape(candidates.shape)]
