"""The final score: the weighted sum of its parts. This is the only module that computes the sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edje_index.scoring.weights import ScoreWeights

if TYPE_CHECKING:
    from edje_index.scoring.parts import Floats, Pairs, Part


@dataclass(frozen=True)
class FinalScore:
    """A weighted sum of parts.

    Attributes:
        weights: weight of each part by name. A weight is a number, or a scalar tensor while the weight is fitted.
    """

    weights: Mapping[str, Any]

    @classmethod
    def of(cls, weights: ScoreWeights) -> FinalScore:
        """Return the final score with `weights`, the weights of one direction."""
        return cls(weights.by_part())

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts in the sum: parts whose weight is a tensor or a number other than 0."""
        return tuple(
            part for part, weight in self.weights.items() if not isinstance(weight, (int, float)) or weight != 0
        )

    def only(self, parts: Iterable[str]) -> FinalScore:
        """Return a final score of the named `parts` alone, with the same weights."""
        return FinalScore({part: self.weights[part] for part in parts if part in self.weights})

    def compute(self, parts: Mapping[str, Part], pairs: Pairs) -> dict[str, Floats]:
        """Compute the parts for b `pairs`, float32 [b] each, by name. Parts with weight 0 are left out."""
        return {part: parts[part].of(pairs) for part in self.parts}

    def sum(self, values: Mapping[str, Any]) -> Any:
        """Return the weighted sum of `values`, arrays or tensors of equal shape by part. The sum has the same shape.

        Raises:
            ValueError: all weights are 0.
        """
        first, *others = self.parts or (None,)
        if first is None:
            raise ValueError("a final score needs at least one part with a weight other than 0")
        total = self.weights[first] * values[first]
        for part in others:
            total = total + self.weights[part] * values[part]
        return total
