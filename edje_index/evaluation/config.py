"""What an evaluation is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TEXT_TO_IMAGE, IMAGE_TO_TEXT = "t2i", "i2t"
DIRECTIONS = (TEXT_TO_IMAGE, IMAGE_TO_TEXT)
CUTOFFS = (1, 5, 10)
FULL_CUTOFFS = (5, 10, 20)
POOLS = (10, 20, 50)
FULL_POOLS = (100,)


@dataclass(frozen=True)
class EvaluationConfig:
    """What to measure.

    Attributes:
        systems: indexes, each with the bundle to search it with, or None for the one that built it.
        captions: file of captions, see `captions.read_captions`.
        images: folder that its image names begin at.
        split: split of the file that questions are taken from.
        precisions: of the tokens; all that an index holds where it is empty.
        simulate: convert in memory what an index does not hold.
        pools: sizes of the re-ranked pools; the protocol's where it is empty.
        directions: of `DIRECTIONS`.
        full: the full-dataset protocol.
        full_captions: further files whose captions may be answered, for the full protocol.
        rerank: False measures the embeddings alone.
        resamples: of the bootstrap; 0 for none.
        queries: at most so many questions of each direction, drawn with `seed`.
        seed: of the draw and of the bootstrap.
        device: "auto", "cpu" or "cuda".
        dtype: of the joint encoder's matrix products, "auto", "float32" or "bfloat16".
        cache: folder that keeps scores.
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
    resamples: int = 1000
    queries: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    cache: Path | None = None

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """The k of R@k."""
        return FULL_CUTOFFS if self.full else CUTOFFS

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Ascending, each once."""
        return tuple(sorted(set(self.pools or (FULL_POOLS if self.full else POOLS))))
