"""Finds images for a text, and re-ranks documents by their images. The modules
`langchain` and `llama_index` use this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from edje_index.scoring.weights import TEXT_TO_IMAGE, relevance
from edje_index.search.client import Client
from edje_index.search.cross_encoder import CrossEncoder
from edje_index.search.hits import Hit
from edje_index.search.token_index import TokenIndex
from storage_formats.arguments import as_count
from storage_formats.errors import UsageError


def find_images(
    index: TokenIndex | Client, query: str, k: int, pool: int | None, where: str | None
) -> list[Hit]:
    """Return the `k` best images for `query`. A `pool` below `k` is raised to `k`."""
    k = as_count(k, "k")
    pool = None if pool is None else max(k, as_count(pool, "pool"))
    return index.search(query, k, pool, where=where)


def rerank_metadata(
    index: TokenIndex,
    query: str,
    metadata: Sequence[Mapping[str, Any]],
    key: str,
    top_n: int | None,
) -> list[tuple[int, dict[str, float]]]:
    """Find the `top_n` documents whose images match `query` best. Return a pair for
    each of these documents, best first: the position of the document in `metadata`, and
    a dictionary with the keys `score` and `relevance`.

    Args:
        index: an open index with the images.
        query: text of the query.
        metadata: metadata of each document.
        key: key of the metadata whose value is the row id or the uri of the image.
        top_n: number of documents to return; None returns all.

    Raises:
        UsageError: the metadata of a document has no row id or uri. Other errors are
            those of `TokenIndex.rerank`.
    """
    rows: list[Any] = [each.get(key) for each in metadata]
    for position, row in enumerate(rows):
        # some stores of metadata return integers as floats
        if isinstance(row, float) and row.is_integer():
            rows[position] = row = int(row)
        if not isinstance(row, Integral | str):
            raise UsageError(
                f"document {position} has no row id or uri in its metadata '{key}';"
                " name the key that holds it",
                parameter="key",
            )
    weights = index.model.weights(TEXT_TO_IMAGE, index.score)
    ranked = CrossEncoder(index).rank(
        query, rows, top_n, activation_fn=lambda scores: scores
    )
    return [
        (
            each["corpus_id"],
            {
                "score": float(each["score"]),
                "relevance": float(relevance(each["score"], weights)),
            },
        )
        for each in ranked
    ]
