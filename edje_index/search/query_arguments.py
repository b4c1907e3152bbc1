"""Checks the texts and the numbers of hits of a search."""

from __future__ import annotations

from storage_formats.arguments import as_count, as_list, as_text, shown
from storage_formats.errors import UsageError


def query_text(text: object, name: str = "query") -> str:
    """Return `text`, a string that is not blank.

    Raises:
        UsageError: `text` is not a string, is blank, or has a lone surrogate.
    """
    query = as_text(text, name)
    if not query.strip():
        raise UsageError(f"{name} is empty or blank, got {shown(query)}: give a text", parameter=name)
    return query


def query_texts(texts: object, name: str = "query") -> list[str]:
    """Return the strings in `texts`, a sequence, an array or an iterator. See `query_text`.

    Raises:
        UsageError: `texts` is not a sequence of strings, or a string is blank or has a lone surrogate.
    """
    return [query_text(text, f"{name}[{at}]") for at, text in enumerate(as_list(texts, name, "strings"))]


def hit_counts(k: object, pool: object) -> tuple[int, int]:
    """Return `k` and `pool` as integers.

    Raises:
        UsageError: one of them is not an integer of at least 1, or `pool` is less than `k`.
    """
    hits, candidates = as_count(k, "k"), as_count(pool, "pool")
    if candidates < hits:
        raise UsageError(f"k must be at most pool, got k = {hits} and pool = {candidates}")
    return hits, candidates
