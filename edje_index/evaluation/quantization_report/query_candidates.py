"""Finds the candidates of many queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edje_index.indexing.faiss_index import AnnIndex
from edje_index.search.reranking import Candidates

if TYPE_CHECKING:
    from edje_index.search.search_model import SearchModel


def query_candidates(
    root: Path, model: SearchModel, queries: Sequence[str], pool: int
) -> Iterator[tuple[str, Candidates]]:
    """Yield (query, candidates) for each of `queries`. The candidates are the `pool` nearest rows in the index."""
    index = AnnIndex.open(root)
    for query, embedding in zip(queries, model.text.encode(queries), strict=True):
        yield query, Candidates(*index.nearest(embedding, pool))
