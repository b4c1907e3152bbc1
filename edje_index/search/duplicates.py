"""Finds groups of near duplicates among the images of an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from storage_formats.arrays import Floats, Ints
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import INDEXED, read_all_rows
from storage_formats.reading.embeddings import read_embeddings

# Up to this number of images, all pairs are compared.
_EXACT = 20_000
# Above, each image is compared with those in the nearest cells: a near duplicate is
# rarely elsewhere.
_CELLS = 1024
_PROBES = 4
# rows of a product, which limits its memory
_QUERIES = 4096


@name_missing_extra("search")
def near_duplicates(
    index: str | Path | CommittedIndex, similarity: float = 0.95
) -> list[list[int]]:
    """Return groups of images whose embeddings are nearly equal, largest group first.

    Two images belong to one group if the cosine similarity of their embeddings is at
    least `similarity`, or if a chain of such pairs connects them. Up to 20,000 images,
    all pairs are compared. In larger indexes, pairs in distant cells are not, so that
    some pairs can be missed.

    Args:
        index: directory of the index, or the open index.
        similarity: least cosine similarity of a pair, above 0 and at most 1.

    Returns:
        The row ids of each group, ascending. Images without a near duplicate are in no
        group.

    Examples:
        >>> from edje_index import near_duplicates
        >>> groups = near_duplicates("photos.edje", 0.99)
        >>> all(len(rows) > 1 for rows in groups)
        True
    """
    if not 0 < similarity <= 1:
        raise UsageError(
            f"similarity must be above 0 and at most 1, got {similarity}",
            parameter="similarity",
        )
    opened = index if isinstance(index, CommittedIndex) else CommittedIndex.open(index)
    table = read_all_rows(opened, ("row_id", "status"))
    is_indexed = np.array(table["status"]) == INDEXED
    rows = np.array(table["row_id"], dtype=np.int64)[is_indexed]
    if len(rows) < 2:
        return []
    first, second = _pairs(read_embeddings(opened, rows), similarity)
    return [rows[members].tolist() for members in _components(len(rows), first, second)]


def _pairs(embeddings: Floats, similarity: float) -> tuple[Ints, Ints]:
    """Return both positions of each similar pair among `embeddings` [n, e]. A pair may
    come twice, and each position comes with itself.
    """
    count, width = embeddings.shape
    # numbers of the cells of each image, [n, probes], the nearest first
    cells = np.zeros((count, 1), dtype=np.int64)
    if count > _EXACT:
        import faiss

        means: Any = faiss.Kmeans(
            width, _CELLS, niter=4, max_points_per_centroid=32, spherical=True
        )
        means.cp.min_points_per_centroid = 1
        means.train(embeddings)
        cells = means.index.search(embeddings, _PROBES)[1]
    # rounding makes the similarity of equal images slightly less than 1
    threshold = similarity - 1e-5
    first = []
    second = []
    for cell in range(cells.max() + 1):
        members = np.flatnonzero(cells[:, 0] == cell)
        queries = np.flatnonzero((cells == cell).any(axis=1))
        # a search of FAISS takes five times as long as the product
        vectors = embeddings[members].T
        for start in range(0, len(queries), _QUERIES):
            part = queries[start : start + _QUERIES]
            rows, columns = np.nonzero(embeddings[part] @ vectors >= threshold)
            first.append(part[rows])
            second.append(members[columns])
    return np.concatenate(first), np.concatenate(second)


def _components(count: int, first: Ints, second: Ints) -> list[Ints]:
    """Return the connected components with several members of the graph of `count`
    nodes with the edges (`first`, `second`), largest first.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array(
        (np.ones(len(first), dtype=np.int8), (first, second)), shape=(count, count)
    )
    _, labels = connected_components(edges, directed=False)
    order = np.argsort(labels, kind="stable")
    ends = np.flatnonzero(np.diff(labels[order])) + 1
    groups = [group for group in np.split(order, ends) if len(group) > 1]
    return sorted(groups, key=lambda group: (-len(group), group[0]))
