"""Searches an index by late interaction, without a model bundle. The caller encodes the
query, for example with ColBERT or ColPali.

The score of a row is MaxSim (Khattab and Zaharia, 2020). For each query vector, take
the largest dot product with a token of the row. MaxSim is the sum of these products
over the query vectors.

The search does not normalise any vectors. To obtain cosine similarities, normalise the
tokens before you store them, and the query vectors before you search.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edje_index.indexing.faiss_index import AnnIndex
from edje_index.search.hits import Hit, Hits
from edje_index.search.rows import IndexRows
from storage_formats.arguments import as_count, repr_of
from storage_formats.arrays import Floats, as_finite
from storage_formats.codecs import Blocks
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import check_row_ids
from storage_formats.token_store import TokenStore

# Number of blocks in one matrix product. BLAS computes so small a product in the
# calling thread. For a larger product it starts threads, which later keep cores busy
# while they wait for work.
_PRODUCT_ROWS = 4


class LateInteractionSearch:
    """Ranks the rows of an index by their MaxSim with the vectors of a query.

    Examples:
        >>> import numpy as np
        >>> from edje_index import LateInteractionSearch
        >>> index = LateInteractionSearch.open("pages.edje")
        >>> # two tokens of row 7
        >>> query = index.store.fetch([7])[0][:2].astype(np.float32)
        >>> [hit.row_id for hit in index.search(query, k=1, row_ids=range(30))]
        [7]
    """

    def __init__(self, index: CommittedIndex, store: TokenStore) -> None:
        """Call `LateInteractionSearch.open` instead; this constructor is internal."""
        self._index = index
        self._ann: AnnIndex | None = None
        self.store = store
        self._rows = IndexRows(index)

    __repr__ = repr_of("store")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._index, self.store)

    @classmethod
    def open(cls, root: str | Path, precision: str | None = None) -> Self:
        """Open the index at `root`.

        Args:
            root: directory of the index.
            precision: precision of the tokens; None selects the stored precision of the
                highest fidelity.

        Raises:
            UsageError, IncompleteIndexError, CorruptIndexError: as for
                `TokenStore.open`.
        """
        index = CommittedIndex.open(root)
        return cls(index, TokenStore(index, precision))

    def search(
        self,
        query: ArrayLike,
        k: int = 10,
        *,
        embedding: ArrayLike | None = None,
        pool: int = 100,
        row_ids: Sequence[int] | NDArray[np.integer] | None = None,
        where: str | None = None,
    ) -> Hits:
        """Return the `k` best rows for `query`, best first. Holes are left out.

        Give either `embedding` or `row_ids`. The argument that is given selects the
        candidates.

        Args:
            query: vectors of one query [q, d].
            k: number of hits.
            embedding: embedding of the query [embed_dim]. The `pool` rows with the
                nearest embeddings are candidates.
            pool: number of candidates that `embedding` selects; ignored if `row_ids`
                is given.
            row_ids: row ids of the candidates. Pass `index.store.row_ids()` to score
                every row.
            where: filter such as "width > 800", see `edje_index.search.where`. Only
                rows that pass the filter are candidates. None lets all rows pass.

        Raises:
            UsageError: an argument has the wrong shape or value, or `embedding` and
                `row_ids` are both given or both missing.
            MissingExtraError: `embedding` is given, but FAISS is not installed.
        """
        k = as_count(k, "k")
        pool = as_count(pool, "pool")
        if (embedding is None) == (row_ids is None):
            raise UsageError(
                "give either embedding or row_ids, which select the candidates"
            )
        passing = None if where is None else self._rows.passing(where)
        if row_ids is None:
            vector = as_finite(embedding, "embedding")
            if vector.ndim != 1:
                raise UsageError(
                    "embedding must be a vector [embed_dim], got an array of shape"
                    f" {list(vector.shape)}"
                )
            if self._ann is None:
                with name_missing_extra("search"):
                    self._ann = AnnIndex(self._index)
            # Stored embeddings have length 1. The query is scaled to this length, so
            # that dot products are cosine similarities. A zero vector stays unchanged.
            length = np.linalg.norm(vector.astype(np.float64)) or 1.0
            unit = (vector / length).astype(np.float32)
            candidates, similarities = self._ann.nearest(unit, pool, passing)
        else:
            candidates = check_row_ids(row_ids, self._index.manifest.spec.rows)
            if passing is not None:
                candidates = candidates[passing[candidates]]
            similarities = np.full(len(candidates), np.nan, np.float32)
        scores = self.store.max_sim(np.asarray(query), candidates)
        present = np.flatnonzero(~np.isnan(scores))
        best = present[np.argsort(-scores[present], kind="stable")[:k]]
        hits = [
            Hit(
                int(candidates[at]),
                uri,
                float(scores[at]),
                float(similarities[at]),
                columns=columns,
            )
            for at, (uri, columns) in zip(
                best, self._rows.described(candidates[best]), strict=True
            )
        ]
        return Hits(hits, self._index.location)


def max_sim(query: Floats, blocks: Blocks) -> Floats:
    """Return the MaxSim of `query` and each block, float32 [k].

    For each query vector, take the largest dot product with a token of the block.
    MaxSim is the sum of these products over the query vectors.

    Args:
        query: query vectors [q, d].
        blocks: token blocks [k, m, d].

    Examples:
        >>> import numpy as np
        >>> from edje_index import max_sim
        >>> query = np.array([[1, 0], [0, 1]], dtype=np.float32)
        >>> blocks = np.array([[[2, 0], [0, 3]], [[1, 1], [0, 0]]], dtype=np.float32)
        >>> max_sim(query, blocks)
        array([5., 2.], dtype=float32)
    """
    transposed = np.ascontiguousarray(query.T)
    scores = np.empty(len(blocks), dtype=np.float32)
    for start in range(0, len(blocks), _PRODUCT_ROWS):
        part = slice(start, start + _PRODUCT_ROWS)
        scores[part] = (
            np.matmul(blocks[part].astype(np.float32), transposed)
            .max(axis=1)
            .sum(axis=1)
        )
    return scores
