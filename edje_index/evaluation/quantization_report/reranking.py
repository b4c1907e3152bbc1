"""The candidates of queries, and the scores that re-ranking gives them at each precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.indexing.faiss_index import AnnIndex
from edje_index.search.token_index import FinalScorer
from storage_formats.codecs import Blocks
from storage_formats.format.manifest import Manifest

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle


@dataclass(frozen=True)
class Candidates:
    """The rows [k] nearest to a query by embedding, best first, and their cosine similarities [k]."""

    query: str
    rows: NDArray[np.int64]
    similarities: NDArray[np.float32]


class Reranker:
    """The second half of a search, over tokens that the caller has read or changed."""

    def __init__(self, root: Path, model: ModelBundle) -> None:
        self._scorer = FinalScorer(root, Manifest.load(root).spec, model)
        self._ann = AnnIndex(root)
        self._model = model

    def candidates(self, queries: Sequence[str], pool: int) -> Iterator[Candidates]:
        """The at most `pool` candidates of each query."""
        for query, embedding in zip(queries, self._model.text.encode(queries), strict=True):
            yield Candidates(query, *self._ann.nearest(embedding, pool))

    def scores(self, candidates: Candidates, blocks: Blocks) -> NDArray[np.float32]:
        """What a search would sort the candidates by if `blocks` [k, m, d] were their tokens -> float32 [k]."""
        return self._scorer.scores(candidates.query, candidates.rows, candidates.similarities, blocks)[1]
