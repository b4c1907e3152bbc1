"""What an evaluation measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edje_index.scoring.weights import BUNDLE_SCORE, DIRECTIONS, ScoreWeights

CUTOFFS = (1, 5, 10)
FULL_CUTOFFS = (5, 10, 20)
POOLS = (10, 20, 50)
FULL_POOLS = (100,)


@dataclass(frozen=True)
class EvaluationConfig:
    """What to measure.

    Example:
        >>> from pathlib import Path
        >>> from edje_index import EvaluationConfig
        >>> EvaluationConfig(systems=((Path("photos.edje"), None),), captions=Path("captions.jsonl")).pool_sizes
        (10, 20, 50)

    Attributes:
        systems: indexes, each with the bundle to search it with, or None for the bundle that built it.
        captions: caption file, see `captions.reading.read_captions`.
        images: base directory of relative image paths.
        split: split of the caption file to take queries from.
        precisions: precisions of the tokens; empty for all that an index holds.
        simulate: also measure precisions that an index does not hold, by converting tokens in memory.
        pools: numbers of candidates to re-rank; empty for those of the protocol.
        directions: directions of search, from `DIRECTIONS`.
        full: use the full-dataset protocol.
        full_captions: further caption files whose captions are candidates in the full-dataset protocol.
        rerank: False measures the embeddings alone.
        score: the score to re-rank by, see `scoring.weights.parse_score`.
        resamples: number of bootstrap resamples; 0 for no intervals.
        queries: largest number of queries per direction, sampled with `seed`.
        seed: seed of the query sample and of the bootstrap.
        device: "auto", "cpu" or "cuda".
        dtype: data type of the joint encoder's matrix products, "auto", "float32" or "bfloat16".
        cache: directory that keeps scores, so that an interrupted evaluation resumes.
    """

    systems: tuple[tuple[Path, Path | None], ...]
    captions: Path
    images: Path | None = None
    split: str | None = None
    precisions: tuple[str, ...] = ()
    simulate: bool = False
    pools: tuple[int, ...] = ()
    directions: tuple[str, ...] = DIRECTIONS
    full: bool = False
    full_captions: tuple[Path, ...] = ()
    rerank: bool = True
    score: str | ScoreWeights = BUNDLE_SCORE
    resamples: int = 1000
    queries: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    cache: Path | None = None

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """The cutoffs k at which R@k is measured."""
        return FULL_CUTOFFS if self.full else CUTOFFS

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """The pool sizes in ascending order, without duplicates."""
        return tuple(sorted(set(self.pools or (FULL_POOLS if self.full else POOLS))))
