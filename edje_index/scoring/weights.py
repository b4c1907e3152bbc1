"""Weights of the parts of the final score: what images are sorted by for a caption, and captions for an image.

final = logit + late x late interaction + pooled x pooled similarity + similarity x embedding similarity
        - prior x prior of the query bank (`query_bank`), whose temperature is `temperature`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Self


class ScoreWeights(NamedTuple):
    """Of one direction; all 0 sorts by the logit alone, as published models do.

    Attributes:
        similarity: of the cosine of the embeddings.
        late, pooled: of late interaction and pooled similarity.
        prior: of what is taken off.
        temperature: of that, in units of the final score.
    """

    similarity: float = 0.0
    late: float = 0.0
    pooled: float = 0.0
    prior: float = 0.0
    temperature: float = 1.0

    @classmethod
    def of_json(cls, value: Mapping[str, float]) -> Self:
        """What `_asdict` gave. ValueError for numbers that are no weights, KeyError for one that is missing."""
        weights = cls(*(float(value[name]) for name in cls._fields))
        if not all(map(math.isfinite, weights)) or weights.temperature <= 0:
            raise ValueError(f"weights of the score are {weights}")
        return weights

    def described(self) -> str:
        """The sum in words, parts of weight 0 left out."""
        added = (
            (self.late, "late interaction"),
            (self.pooled, "pooled similarity"),
            (self.similarity, "similarity"),
        )
        terms = "".join(f" + {weight:g} x {name}" for weight, name in added if weight)
        return f"logit{terms}" + (f" - {self.prior:g} x prior" if self.prior else "")
