"""Searches all FAISS files of `ann/` and returns exact similarities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edje_index.indexing.faiss_part import FaissIndex, Vectors, is_exact, number_of_lists, search_part
from storage_formats.reading.embeddings import IndexedEmbeddings

_CANDIDATES_PER_NEIGHBOUR = 2
"""Number of candidates per requested row if FAISS stores codes. Their stored embeddings are then compared."""

_ROWS_AT_ONCE = 1 << 15  # 50 MB of embeddings of 384 values

Neighbours: TypeAlias = tuple[NDArray[np.int64], Vectors]
"""Row ids [k] and cosine similarities [k]."""


@dataclass(frozen=True)
class AnnParts:
    """The FAISS indexes of a nearest-neighbour index. Each FAISS index contains the rows of some segments.

    Attributes:
        embeddings: the stored embeddings of the index.
        parts: the FAISS indexes.
    """

    embeddings: IndexedEmbeddings
    parts: Sequence[FaissIndex]

    def __len__(self) -> int:
        return sum(int(part.ntotal) for part in self.parts)

    @property
    def lists(self) -> int:
        """Largest number of inverted lists in any of the FAISS indexes; 0 if all FAISS indexes are flat."""
        return max(map(number_of_lists, self.parts))

    def nearest(
        self, queries: Vectors, k: int, *, probes: int | None = None, live: NDArray[np.uint8] | None = None
    ) -> list[Neighbours]:
        """Return at most `k` nearest rows for each query, best first.

        If a FAISS index stores codes, the stored embeddings of its results are read. The similarities are therefore
        exact.

        Args:
            queries: query embeddings [q, embed_dim].
            k: number of rows per query.
            probes: number of inverted lists to search in each FAISS index; None uses the number in the FAISS file.
            live: bitmap of the rows to search, one bit per row, lowest bit first; None searches all rows.

        Raises:
            CorruptIndexError: an embedding cannot be read.
        """
        exact = all(map(is_exact, self.parts))
        wanted = k if exact else k * _CANDIDATES_PER_NEIGHBOUR
        results = [
            search_part(part, queries, wanted, probes=probes, live=live) for part in self.parts if int(part.ntotal)
        ]
        empty = (np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64))
        scores, rows = (np.concatenate(values, axis=1) for values in zip(empty, *results, strict=True))
        neighbours = []
        for query, its_scores, its_rows in zip(queries, scores, rows, strict=True):
            filled = its_rows >= 0  # FAISS returns -1 if the searched lists contain too few vectors
            candidates, similarities = its_rows[filled], its_scores[filled]
            if not exact:
                similarities = self.embeddings[candidates] @ query
            order = np.argsort(-similarities, kind="stable")[:k]
            neighbours.append((candidates[order], similarities[order]))
        return neighbours

    def nearest_exactly(self, queries: Vectors, k: int, passing: NDArray[np.bool_]) -> list[Neighbours]:
        """Return the `k` nearest rows among the rows in `passing` for each query, best first, by exact search.

        Args:
            queries: query embeddings [q, embed_dim].
            k: number of rows per query.
            passing: which rows to search, bool [rows].

        Raises:
            CorruptIndexError: an embedding cannot be read.
        """
        if all(map(is_exact, self.parts)):
            return self.nearest(queries, k, probes=self.lists or None, live=np.packbits(passing, bitorder="little"))
        row_ids = np.flatnonzero(passing)
        best = [(np.empty(0, np.int64), np.empty(0, np.float32)) for _ in queries]
        for start in range(0, len(row_ids), _ROWS_AT_ONCE):
            rows = row_ids[start : start + _ROWS_AT_ONCE]
            vectors = self.embeddings[rows]
            has_vector = ~np.isnan(vectors[:, 0])  # holes have none
            rows, similarities = rows[has_vector], queries @ vectors[has_vector].T
            best = [_best(kept, (rows, its), k) for kept, its in zip(best, similarities, strict=True)]
        return best


def _best(kept: Neighbours, further: Neighbours, k: int) -> Neighbours:
    """Merge two results of one query, and return the `k` nearest rows, best first."""
    rows, similarities = np.concatenate([kept[0], further[0]]), np.concatenate([kept[1], further[1]])
    order = np.argsort(-similarities, kind="stable")[:k]
    return rows[order], similarities[order]
