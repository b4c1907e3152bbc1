"""Weights of the final score: one `ScoreWeights` per direction of search."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from edje_index.errors import ModelError
from storage_formats.arguments import as_text
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from storage_formats.arrays import Array, Bools, Floats

TEXT_TO_IMAGE = "t2i"
IMAGE_TO_TEXT = "i2t"
DIRECTIONS = (TEXT_TO_IMAGE, IMAGE_TO_TEXT)

LOGIT = "logit"
LATE = "late"
POOLED = "pooled"
EMBEDDING = "embedding"
PART_NAMES = {
    LOGIT: "logit",
    LATE: "late interaction",
    POOLED: "pooled similarity",
    EMBEDDING: "embedding similarity",
}
"""The keys of the parts, in the order in which they are summed. The values are the
names of the parts in reports.
"""
JOINT_PARTS = (LOGIT, LATE, POOLED)
"""The parts that depend on the caption and on the stored tokens together."""
MAX_WEIGHT = 1e30
"""Largest absolute weight of a part. With this limit, the weighted sum of the parts
stays below the largest float32, 3.4e38.
"""
WEAK_RELEVANCE = 0.5
"""Hits with a lower relevance are shown as weak matches."""
BUNDLE_SCORE = "bundle"
"""The value of `score` that selects the weights in the model bundle."""


@dataclass(frozen=True)
class ScoreWeights:
    """Weights of the parts of the final score in one direction.

    By default, the final score is the logit, as in the EDJE paper.

    Attributes:
        logit: weight of the joint encoder's matching logit.
        late: weight of the late interaction.
        pooled: weight of the pooled similarity.
        embedding: weight of the cosine similarity of the embeddings.
        calibration: (slope, offset) of the relevance, which is the logistic function of
            slope * final score + offset; see `relevance`. The slope is
            above 0. None if no calibration was fitted.
        shares: share of each part in the spread of the final score over the pools of
            development queries, by name. The share of a part is the standard deviation
            of the weighted part, divided by the sum of the standard deviations of all
            weighted parts. None if not measured.
    """

    logit: float = 1.0
    late: float = 0.0
    pooled: float = 0.0
    embedding: float = 0.0
    calibration: tuple[float, float] | None = None
    shares: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name, weight in self.by_part().items():
            if not abs(weight) <= MAX_WEIGHT:
                raise ValueError(
                    f"the weight of the part '{name}' must be a number from -1e30 to"
                    f" 1e30, got {weight}"
                )
        if self.calibration is not None:
            slope, offset = self.calibration
            if not (0 < slope < MAX_WEIGHT and abs(offset) < MAX_WEIGHT):
                raise ValueError(
                    "the slope of the relevance must be positive, and both numbers"
                    f" finite: {self.calibration}"
                )

    def by_part(self) -> dict[str, float]:
        """Return the weights of the parts in the sum, which are not 0, by name."""
        weights = {part: getattr(self, part) for part in PART_NAMES}
        return {part: weight for part, weight in weights.items() if weight}

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts in the sum: those whose weight is not 0."""
        return tuple(self.by_part())

    def only(self, parts: Iterable[str]) -> ScoreWeights:
        """Return the weights of the named parts alone; the others get the weight 0."""
        return ScoreWeights.of_parts({part: getattr(self, part) for part in parts})

    def sum(self, values: Mapping[str, Any]) -> Any:
        """Return the final score: the weighted sum of the parts. No other function
        computes this sum.

        Args:
            values: arrays or tensors of the same shape, by name of the part.

        Raises:
            ValueError: all weights are 0. `may_be_first` also raises this error if the
                logit is the only part.
        """
        weights = self.by_part()
        if not weights:
            raise ValueError(
                "a final score needs at least one part with a weight other than 0"
            )
        return sum(weight * values[part] for part, weight in weights.items())

    def may_be_first(
        self, values: Mapping[str, Floats], k: int, logit_range: tuple[float, float]
    ) -> Bools:
        """Return which of p candidates can have one of the `k` highest final scores if
        all logits are in `logit_range`, bool [p]. At least `k` candidates are True, or
        all if there are fewer.

        The logit takes the most time of all parts, so a search computes it for these
        candidates only.

        Args:
            values: values of the parts by name, float32 [p] each. That of the logit is
                not used.
            k: number of hits.
            logit_range: smallest and largest logit.
        """
        # the command line reads this module, and must start without NumPy
        import numpy as np

        others = self.only(part for part in self.parts if part != LOGIT).sum(values)
        if len(others) <= k:
            return np.ones(len(others), dtype=np.bool_)
        # `others` has the weighted sum of the other parts for each candidate. The
        # weighted logits of two candidates differ by at most `width`. A candidate whose
        # sum is more than `width` below the k-th best sum therefore has a lower final
        # score than the k candidates with the best sums.
        width = abs(self.logit) * (logit_range[1] - logit_range[0])
        mask: Bools = others >= np.partition(others, -k)[-k] - width
        return mask

    @classmethod
    def of_parts(cls, weights: Mapping[str, float]) -> Self:
        """Return weights from a mapping of part names to weights. Parts that are not in
        `weights` have the weight 0. This includes the logit, whose default is 1
        elsewhere.
        """
        by_part: dict[str, Any] = {
            part: float(weights.get(part, 0.0)) for part in PART_NAMES
        }
        return cls(**by_part)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return weights from `value`, a result of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: a weight is missing or is not a finite
                number.
        """
        weights = cls.of_parts({part: value[part] for part in PART_NAMES})
        if calibration := value.get("calibration"):
            line = (float(calibration["slope"]), float(calibration["offset"]))
            weights = replace(weights, calibration=line)
        if shares := value.get("shares"):
            by_part = {part: float(shares[part]) for part in PART_NAMES}
            weights = replace(weights, shares=by_part)
        return weights

    def to_json(self) -> dict[str, Any]:
        """Return the weights as a dictionary of JSON values."""
        content: dict[str, Any] = {part: getattr(self, part) for part in PART_NAMES}
        if self.calibration is not None:
            slope, offset = self.calibration
            content["calibration"] = {"slope": slope, "offset": offset}
        if self.shares is not None:
            content["shares"] = self.shares
        return content

    def described(self) -> str:
        """Return a description of the final score.

        If there are shares, it names the share of each part in the spread of the score,
        for example ``60 % late interaction + 40 % embedding similarity``. Otherwise it
        is the weighted sum, for example ``logit + 2.5 x embedding similarity``.
        """
        if self.shares is not None:
            terms = [
                f"{100 * share:.0f} % {PART_NAMES[part]}"
                for part, share in self.shares.items()
                if share
            ]
        else:
            terms = [
                PART_NAMES[part]
                if weight == 1 and part == LOGIT
                else f"{weight:g} x {PART_NAMES[part]}"
                for part, weight in self.by_part().items()
            ]
        return " + ".join(terms) or "0"


@dataclass(frozen=True)
class DirectionWeights:
    """One `ScoreWeights` for each direction of search.

    Attributes:
        t2i: weights for text-to-image search: queries are captions, candidates are
            images.
        i2t: weights for image-to-text search: queries are images, candidates are
            captions.
    """

    t2i: ScoreWeights = field(default_factory=ScoreWeights)
    i2t: ScoreWeights = field(default_factory=ScoreWeights)

    def of(self, direction: str) -> ScoreWeights:
        """Return the weights of `direction`, "t2i" or "i2t"."""
        weights: ScoreWeights = getattr(self, direction)
        return weights

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return weights from `value`, a result of :meth:`to_json`. Raises the same
        errors as `ScoreWeights.from_json`.
        """
        return cls(
            *(ScoreWeights.from_json(value[direction]) for direction in DIRECTIONS)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the weights by direction as a dictionary of JSON values."""
        return {direction: self.of(direction).to_json() for direction in DIRECTIONS}


def parse_score(
    score: str | ScoreWeights, bundle_weights: ScoreWeights
) -> ScoreWeights:
    """Return the weights that `score` describes.

    Args:
        score: "bundle" selects `bundle_weights`. "PART=WEIGHT,..." lists parts and
            their weights; a PART is a key of `PART_NAMES`. A "PART" without "=WEIGHT"
            has the weight 1, and parts that are not listed have the weight 0.
            `ScoreWeights` are returned unchanged.
        bundle_weights: weights of the model bundle.

    Raises:
        UsageError: a part is unknown, a weight is not a number from -1e30 to 1e30, or
            all weights are 0.
    """
    if isinstance(score, ScoreWeights):
        return score
    if as_text(score, "score") == BUNDLE_SCORE:
        return bundle_weights
    weights: dict[str, float] = {}
    for item in score.split(","):
        part, equals, number = (text.strip() for text in item.partition("="))
        if part not in PART_NAMES:
            raise UsageError(
                f"unknown part '{part}' of the score: give '{BUNDLE_SCORE}', or"
                f" PART=WEIGHT,... with the parts {', '.join(PART_NAMES)}",
                parameter="score",
            )
        try:
            weights[part] = float(number) if equals else 1.0
            ScoreWeights.of_parts(weights)
        except ValueError as error:
            raise UsageError(
                f"{item.strip()!r} needs a weight from -1e30 to 1e30: {error}",
                parameter="score",
            ) from error
    if not any(weights.values()):
        raise UsageError(
            f"the score '{score}' gives every part the weight 0: give one part another"
            " weight",
            parameter="score",
        )
    return ScoreWeights.of_parts(weights)


def check_parts(weights: ScoreWeights, available: Collection[str], what: str) -> None:
    """Raise ModelError if a part has a weight other than 0, but is not in `available`.

    `what` is the subject of the error message, for example "the bundle".
    """
    missing = [PART_NAMES[part] for part in weights.parts if part not in available]
    if missing:
        raise ModelError(
            f"{what} has no {' and no '.join(missing)}: use only the parts"
            f" {', '.join(available)}"
        )


def relevance(scores: Array, weights: ScoreWeights) -> Array:
    """Return the relevance of each score, between 0 and 1. A higher score never has a
    lower relevance.

    With a calibration, the relevance is a logistic function of the score. It was fitted
    on the pools of development queries, to tell matching pairs from pairs that do not
    match. Both kinds of pairs have the same total weight in the fit, so at a relevance
    of 0.5, both kinds are equally likely. Half of the weight of the pairs that do not
    match is given to the best such pair of each pool, which would be the first hit if
    the query had no match. For photos and texts other
    than those of the fit, the relevance is not the probability of a match.

    Without a calibration, the relevance is (1 + cosine) / 2 if the score is the
    embedding similarity alone, and the logistic function of the score otherwise. If the
    score is the logit alone, this is the match probability of the joint encoder.

    Args:
        scores: final scores, in an array of any shape.
        weights: weights with which `scores` were computed.
    """
    import numpy as np

    values = np.asarray(scores, dtype=np.float64)
    if weights.calibration is None and weights.parts == (EMBEDDING,):
        return np.clip((1 + values / abs(weights.embedding)) / 2, 0, 1)
    slope, offset = weights.calibration or (1.0, 0.0)
    # This is the logistic function. In this form it cannot overflow.
    return np.asarray(0.5 * (1 + np.tanh((slope * values + offset) / 2)))
