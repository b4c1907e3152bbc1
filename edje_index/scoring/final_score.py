"""The final score: the weighted sum of its parts. No other module adds parts up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edje_index.scoring.weights import ScoreWeights

if TYPE_CHECKING:
    from edje_index.scoring.parts import Floats, Pairs, Part


@dataclass(frozen=True)
class FinalScore:
    """The weighted sum of parts.

    Attributes:
        weights: weight of each part by its name. A weight is a number, or a scalar tensor that a fit differentiates by.
    """

    weights: Mapping[str, Any]

    @classmethod
    def of(cls, weights: ScoreWeights) -> FinalScore:
        """The final score with the weights of one direction."""
        return cls(weights.by_part())

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that count: those whose weight is not the number 0."""
        return tuple(
            part for part, weight in self.weights.items() if not isinstance(weight, (int, float)) or weight != 0
        )

    def only(self, parts: Iterable[str]) -> FinalScore:
        """The sum of the given parts alone, with the same weights."""
        return FinalScore({part: self.weights[part] for part in parts if part in self.weights})

    def compute(self, parts: Mapping[str, Part], pairs: Pairs) -> dict[str, Floats]:
        """Each part that counts, float32 [b], for `pairs`. Parts of weight 0 are not computed."""
        return {part: parts[part].of(pairs) for part in self.parts}

    def sum(self, values: Mapping[str, Any]) -> Any:
        """The sum over the parts that count: arrays or tensors of one shape in, one of that shape out.

        Raises:
            ValueError: no part counts.
        """
        first, *others = self.parts or (None,)
        if first is None:
            raise ValueError("at least one part of a final score must have a weight other than 0")
        total = self.weights[first] * values[first]
        for part in others:
            total = total + self.weights[part] * values[part]
        return total
