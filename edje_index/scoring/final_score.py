"""Computes the final score, a weighted sum of parts. No other module computes this sum.

A search may let the joint encoder score only the best candidates of a query by the other parts (`joint_pool`). Each of
the other candidates gets the lowest weighted logit of the scored candidates. Therefore all final scores of a query can
be compared, and the scored candidates rank above the other candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edje_index.scoring.weights import LOGIT, ScoreWeights
from storage_formats.arguments import as_count
from storage_formats.errors import UsageError

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class FinalScore:
    """A weighted sum of parts. In shapes, p is the number of candidates of one query.

    Attributes:
        weights: weight of each part by name. A weight is a number; during weight fitting, a weight is a scalar tensor.
    """

    weights: Mapping[str, Any]

    @classmethod
    def of(cls, weights: ScoreWeights, joint_pool: int | None = None) -> FinalScore:
        """Return the final score with the given weights of one direction, and check that they allow `joint_pool`."""
        score = cls(weights.by_part())
        if joint_pool is not None:
            as_count(joint_pool, "joint_pool")
            if LOGIT not in score.parts:
                raise UsageError(
                    "joint_pool has no effect on a score without the logit: leave out joint_pool",
                    parameter="joint_pool",
                )
            if score.parts == (LOGIT,):
                raise UsageError(
                    "joint_pool needs a score with other parts than the logit, because these parts choose the "
                    "candidates: leave out joint_pool, or set a smaller pool",
                    parameter="joint_pool",
                )
        return score

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts in the sum. A part is left out if its weight is the number 0."""
        return tuple(
            part for part, weight in self.weights.items() if not isinstance(weight, (int, float)) or weight != 0
        )

    def only(self, parts: Iterable[str]) -> FinalScore:
        """Return a copy of this final score that contains only the named parts."""
        return FinalScore({part: self.weights[part] for part in parts if part in self.weights})

    def sum(self, values: Mapping[str, Any]) -> Any:
        """Return the weighted sum of the values of the parts by name, which are arrays or tensors of the same shape."""
        first, *others = self.parts or (None,)
        if first is None:
            raise ValueError("a final score needs at least one part with a weight other than 0")
        total = self.weights[first] * values[first]
        for part in others:
            total = total + self.weights[part] * values[part]
        return total

    def joint_candidates(
        self, values: Mapping[str, Floats], row_ids: NDArray[np.int64], joint_pool: int
    ) -> NDArray[np.bool_]:
        """Return which candidates the joint encoder scores: the best by the other parts, bool [..., p].

        Args:
            values: the parts besides the logit by name, float32 [..., p] each.
            row_ids: row ids of the candidates, or other numbers that order candidates of equal scores [..., p].
            joint_pool: number of candidates per query that the joint encoder scores.
        """
        sums = self.only(part for part in self.parts if part != LOGIT).sum(values)
        best = np.lexsort((row_ids, -sums), axis=-1)[..., :joint_pool]
        mask = np.zeros(sums.shape, dtype=np.bool_)
        np.put_along_axis(mask, best, True, axis=-1)
        return mask

    def with_every_logit(self, values: Mapping[str, Floats]) -> dict[str, Floats]:
        """Return a copy of `values` without missing logits.

        A candidate without a logit gets the lowest logit of the same query, or the highest if the weight is negative.

        Args:
            values: the parts by name, float32 [..., p] each. The logit is NaN for candidates that were not scored.
        """
        logits = values[LOGIT]
        if logits.shape[-1]:
            lowest = np.nanmin if self.weights[LOGIT] > 0 else np.nanmax
            logits = np.where(np.isnan(logits), lowest(logits, axis=-1, keepdims=True), logits)
        return {**values, LOGIT: logits}
