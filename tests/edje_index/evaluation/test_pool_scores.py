"""Evaluations with a joint pool, for pools whose best candidates differ from pool size to pool size."""

from __future__ import annotations

import numpy as np

from edje_index.evaluation.pool_scores import PoolScorer
from edje_index.evaluation.pools import Pools
from edje_index.scoring.weights import ScoreWeights

LATE = np.array([[1, 2, 9, 0, 0]], dtype=np.float32)
LOGITS = np.array([[0.5, 0.25, -1, 4, 8]], dtype=np.float32)


class FixedParts(PoolScorer):
    """Takes the parts from tables instead of a model."""

    def _add_joint_part(self, values, part, needed, *, source, on_progress):
        for direction, parts in values.items():
            table = {"late": LATE, "logit": LOGITS}[part]
            parts[part] = np.where(needed[direction], table, np.float32(np.nan))


def test_a_pool_size_uses_no_logit_that_only_another_one_needs():
    pools = Pools(np.arange(5)[None], np.zeros((1, 5), np.float32), np.zeros((1, 5), np.bool_), np.zeros(1, np.int64))
    weights = {"t2i": ScoreWeights(logit=1, late=1)}
    known = {"model": None, "eval_set": None, "embeddings": None, "cache": None, "index_key": None}
    scorer = FixedParts(weights=weights, pools={"t2i": pools}, pool_sizes=(2, 5), joint_pool=1, **known)
    scores = scorer.score(None, None)["t2i"]
    # Candidate 1 is the best of the first two, and candidate 2 the best of all. Each time it alone has a logit.
    np.testing.assert_array_equal(scores[2], LATE[:, :2] + 0.25)
    np.testing.assert_array_equal(scores[5], LATE - 1)
