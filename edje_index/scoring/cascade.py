"""The cascade: the joint encoder scores only the best candidates of a query by the other parts of the final score.

The joint encoder does not score the other candidates. Each gets the lowest weighted logit of the scored candidates.
Therefore all final scores of a query can be compared, and the scored candidates rank above the other candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.weights import LOGIT
from storage_formats.arguments import as_count
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.scoring.parts import Floats


@dataclass(frozen=True)
class Cascade:
    """Chooses the candidates that the joint encoder scores. In shapes, p is the number of candidates of one query.

    Attributes:
        score: the final score.
        joint_pool: number of candidates per query that the joint encoder scores.

    Raises:
        UsageError: `joint_pool` is less than 1, or `score` lacks the logit or has no other part.
    """

    score: FinalScore
    joint_pool: int

    def __post_init__(self) -> None:
        problem = None
        as_count(self.joint_pool, "joint_pool")
        if LOGIT not in self.score.parts:
            problem = "joint_pool has no effect on a score without the logit: leave out joint_pool"
        elif not self.others.parts:
            problem = (
                "joint_pool needs a score with other parts than the logit, because these parts choose the candidates: "
                "leave out joint_pool, or set a smaller pool"
            )
        if problem is not None:
            raise UsageError(problem, parameter="joint_pool")

    @cached_property
    def others(self) -> FinalScore:
        """The final score without the logit."""
        return self.score.only(part for part in self.score.parts if part != LOGIT)

    def chosen(self, values: Mapping[str, Floats], row_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which candidates the joint encoder scores, bool [..., p].

        Args:
            values: the parts besides the logit by name, float32 [..., p] each.
            row_ids: row ids of the candidates, or other numbers that order candidates of equal scores [..., p].
        """
        sums = self.others.sum(values)
        best = np.lexsort((row_ids, -sums), axis=-1)[..., : self.joint_pool]
        mask = np.zeros(sums.shape, dtype=np.bool_)
        np.put_along_axis(mask, best, True, axis=-1)
        return mask

    def with_every_logit(self, values: Mapping[str, Floats]) -> dict[str, Floats]:
        """Return a copy of `values` without missing logits.

        A candidate without a logit gets the lowest logit of the same query, or the highest if the weight is negative.

        Args:
            values: the parts by name, float32 [..., p] each. The logit is NaN for candidates that were not chosen.
        """
        logits = values[LOGIT]
        if logits.shape[-1]:
            lowest = np.nanmin if self.score.weights[LOGIT] > 0 else np.nanmax
            logits = np.where(np.isnan(logits), lowest(logits, axis=-1, keepdims=True), logits)
        return {**values, LOGIT: logits}
