"""Computes the final score, a weighted sum of parts. No other module computes this sum."""

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
        weights: weight of each part by name. A weight is a number; during weight fitting, a weight is a scalar tensor.
    """

    weights: Mapping[str, Any]

    @classmethod
    def of(cls, weights: ScoreWeights) -> FinalScore:
        """Return the final score with the given weights of one direction."""
        return cls(weights.by_part())

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts in the sum. A part is left out if its weight is the number 0."""
        return tuple(
            part for part, weight in self.weights.items() if not isinstance(weight, (int, float)) or weight != 0
        )

    def only(self, parts: Iterable[str]) -> FinalScore:
        """Return a copy of this final score that contains only the named parts."""
        return FinalScore({part: self.weights[part] for part in parts if part in self.weights})

    def compute(self, parts: Mapping[str, Part], pairs: Pairs) -> dict[str, Floats]:
        """Compute each part in the sum for b pairs, and return the values by part name, float32 [b] each.

        Args:
            parts: all available parts by name.
            pairs: pairs of a caption and an image.
        """
        return {part: parts[part].of(pairs) for part in self.parts}

    def sum(self, values: Mapping[str, Any]) -> Any:
        """Return the weighted sum of the values of the parts.

        Args:
            values: value of each part by name: arrays or tensors of the same shape.

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
