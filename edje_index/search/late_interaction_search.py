"""Late-interaction search with query vectors of the caller's own encoder (ColBERT, ColPali), without a model bundle.

The score of a row is MaxSim (Khattab and Zaharia, 2020): for each query vector the largest dot product with any token
of the row, summed over the query vectors. Tokens are used as stored, so normalise both sides for cosine similarity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edje_index.indexing.faiss_index import AnnIndex
from storage_formats.codecs import Blocks
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import read_index_rows
from storage_formats.token_store import TokenStore

_BATCH_ROWS = 256  # 12 MB of 64 x 384 blocks: they stay in the processor's cache between reading and scoring


@dataclass(frozen=True)
class TokenHit:
    """One result of a late-interaction search.

    Attributes:
        row_id: its row.
        uri: where the input came from.
        score: MaxSim of the query vectors and the row's tokens.

    Example:
        >>> from edje_index import TokenHit
        >>> TokenHit(row_id=7, uri="page-7", score=12.5).uri
        'page-7'
    """

    row_id: int
    uri: str
    score: float


class LateInteractionSearch:
    """Ranks rows of an index by late interaction with a matrix of query vectors.

    Example:
        >>> import numpy as np
        >>> from edje_index import LateInteractionSearch
        >>> index = LateInteractionSearch.open("pages.edje")
        >>> query = index.store.fetch([7])[0][:2].astype(np.float32)  # two tokens of row 7
        >>> [hit.row_id for hit in index.search(query, k=1, row_ids=range(30))]
        [7]
    """

    def __init__(self, index: CommittedIndex, store: TokenStore) -> None:
        """Use `LateInteractionSearch.open` instead."""
        self._index = index
        self._ann: AnnIndex | None = None
        self.store = store

    @classmethod
    def open(cls, root: str | Path, precision: str | None = None) -> Self:
        """Open the index at `root`.

        Args:
            root: the index.
            precision: precision of the tokens; None takes the first that the index holds.

        Raises:
            UsageError, IncompleteIndexError, CorruptIndexError: as `TokenStore.open`.
        """
        index = CommittedIndex.open(root)
        return cls(index, TokenStore(index, precision or index.manifest.spec.precisions[0]))

    def search(
        self,
        query: ArrayLike,
        k: int = 10,
        *,
        embedding: ArrayLike | None = None,
        pool: int = 100,
        row_ids: Sequence[int] | NDArray[np.integer] | None = None,
    ) -> list[TokenHit]:
        """The `k` best rows for `query`, best first. Holes are left out.

        Args:
            query: [q, d], the vectors of one query.
            k: number of hits.
            embedding: [embed_dim], the query's embedding; its `pool` nearest rows are the candidates.
            pool: number of candidates taken by `embedding`.
            row_ids: the candidates themselves, instead of `embedding`; `index.store.row_ids()` scores every row.

        Raises:
            UsageError: an argument has the wrong shape or value, or not exactly one of `embedding` and `row_ids` is
                given.
            MissingExtraError: `embedding` is given and FAISS is not installed.
        """
        if k < 1 or pool < 1:
            raise UsageError(f"k and pool must be at least 1, got k = {k}, pool = {pool}")
        if (embedding is None) == (row_ids is None):
            raise UsageError("give exactly one of embedding and row_ids to choose the candidates")
        candidates = self._nearest(embedding, pool) if row_ids is None else np.asarray(row_ids, dtype=np.int64)
        scores = self.scores(query, candidates)
        present = np.flatnonzero(~np.isnan(scores))
        best = present[np.argsort(-scores[present], kind="stable")[:k]]
        uris = read_index_rows(self._index, candidates[best], ["uri"])["uri"].to_pylist()
        return [
            TokenHit(int(row), uri, float(score))
            for row, uri, score in zip(candidates[best], uris, scores[best], strict=True)
        ]

    def scores(self, query: ArrayLike, row_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """MaxSim of `query` [q, d] and each of `row_ids` -> float32 [k], NaN for a hole.

        Blocks are read in batches, so that memory does not grow with k.
        """
        vectors = np.asarray(query, dtype=np.float32)
        width = self.store.block_shape[1]
        if vectors.ndim != 2 or not len(vectors) or vectors.shape[1] != width:
            raise UsageError(f"a query must have the shape [q, {width}] with q at least 1, got {list(vectors.shape)}")
        parts = [max_sim(vectors, blocks) for blocks in self.store.iter_fetch(_batches(np.asarray(row_ids)))]
        return np.concatenate([np.empty(0, np.float32), *parts])

    @name_missing_extra("search")
    def _nearest(self, embedding: ArrayLike | None, pool: int) -> NDArray[np.int64]:
        """The `pool` rows with the embeddings nearest to `embedding`."""
        if self._ann is None:
            self._ann = AnnIndex(self._index)
        vector = np.asarray(embedding, dtype=np.float32)
        if vector.ndim != 1:
            raise UsageError(f"embedding must be a vector, got the shape {list(vector.shape)}")
        return self._ann.nearest(vector, pool)[0]


def max_sim(query: NDArray[np.float32], blocks: Blocks) -> NDArray[np.float32]:
    """Sum over query vectors [q, d] of the largest dot product with a token of each block [k, m, d] -> [k].

    Example:
        >>> import numpy as np
        >>> from edje_index import max_sim
        >>> query = np.array([[1, 0], [0, 1]], dtype=np.float32)
        >>> blocks = np.array([[[2, 0], [0, 3]], [[1, 1], [0, 0]]], dtype=np.float32)
        >>> max_sim(query, blocks)
        array([5., 2.], dtype=float32)
    """
    count, m, d = blocks.shape
    products = blocks.astype(np.float32).reshape(count * m, d) @ query.T
    best = products.reshape(count, m, len(query)).max(axis=1)
    scores: NDArray[np.float32] = best.sum(axis=1)
    return scores


def _batches(row_ids: NDArray[np.integer]) -> Iterator[NDArray[np.integer]]:
    for start in range(0, len(row_ids), _BATCH_ROWS):
        yield row_ids[start : start + _BATCH_ROWS]
