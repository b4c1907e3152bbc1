"""Finds groups of near duplicates among the images of an index."""

from __future__ import annotations

from typing import Any

import numpy as np

from storage_formats.arguments import as_number
from storage_formats.arrays import Floats, Ints
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import INDEXED, read_all_rows
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.remote.urls import IndexLocation

# If there are at most this number of images, all pairs are compared. More images are
# divided into cells by k-means, and each image is compared only with the images of the
# cells nearest to it, because a near duplicate is rarely in another cell.
_EXACT = 20_000
_CELLS = 1024
# number of cells that are nearest to an image and searched for its near duplicates
_PROBES = 4
# number of images whose pairs are in memory at the same time
_QUERIES = 256


@name_missing_extra("search")
def near_duplicates(index: IndexLocation, similarity: float = 0.95) -> list[list[int]]:
    """Return groups of images whose embeddings are nearly equal, largest group first.

    Two images belong to one group if the cosine similarity of their embeddings is at
    least `similarity`, or if a chain of such pairs connects them.

    If the index has at most 20,000 images, all pairs are compared. The images of larger
    indexes are divided into 1,024 cells by k-means, and each image is compared only
    with the images of the 4 cells nearest to it. Some pairs can therefore be missed.

    Args:
        index: directory of the index, or its URL on an object store.
        similarity: smallest cosine similarity of a pair of near duplicates, above 0 and
            at most 1.

    Returns:
        The row ids of each group, ascending. Images without a near duplicate are in no
        group.

    Raises:
        UsageError: `similarity` is out of range, or there is no index.

    Examples:
        >>> from edje_index import near_duplicates
        >>> groups = near_duplicates("photos.edje", 0.99)
        >>> all(len(rows) > 1 for rows in groups)
        True
    """
    if not 0 < as_number(similarity, "similarity") <= 1:
        raise UsageError(
            f"similarity must be above 0 and at most 1, got {similarity}",
            parameter="similarity",
        )
    opened = CommittedIndex.open(index)
    table = read_all_rows(opened, ("row_id", "status"))
    is_indexed = np.array(table["status"]) == INDEXED
    rows = np.array(table["row_id"], dtype=np.int64)[is_indexed]
    if len(rows) < 2:
        return []
    first, second = _pairs(read_embeddings(opened, rows), similarity)
    return [rows[members].tolist() for members in _components(len(rows), first, second)]


def _pairs(embeddings: Floats, similarity: float) -> tuple[Ints, Ints]:
    """Return pairs of positions in `embeddings` [n, e] that connect the same images as
    all similar pairs do, as two int64 arrays of equal length. An image also forms a
    pair with itself.
    """
    import faiss

    count, width = embeddings.shape
    index: Any = faiss.IndexFlatIP(width)
    if count > _EXACT:
        index = faiss.IndexIVFFlat(index, width, _CELLS, faiss.METRIC_INNER_PRODUCT)
        index.cp.niter = 4
        index.cp.max_points_per_centroid = 32
        index.cp.min_points_per_centroid = 1
        index.nprobe = _PROBES
        index.train(embeddings)
    index.add(embeddings)
    # Thousands of alike images have millions of pairs. So of the pairs of some images,
    # one per image is kept.
    kept = []
    for start in range(0, count, _QUERIES):
        # Rounding can make the computed similarity of a pair slightly too low. A
        # slightly lower threshold keeps such a pair.
        ends, _, second = index.range_search(
            embeddings[start : start + _QUERIES], similarity - 1e-5
        )
        sizes = np.diff(ends.astype(np.int64))
        first = np.repeat(np.arange(start, start + len(sizes)), sizes)
        images, pairs = np.unique([first, second], return_inverse=True)
        labels = _labels(len(images), *pairs.reshape(2, -1))
        _, earliest = np.unique(labels, return_index=True)
        kept.append(np.stack([images[earliest[labels]], images]))
    first, second = np.concatenate(kept, axis=1)
    return first, second


def _components(count: int, first: Ints, second: Ints) -> list[Ints]:
    """Return the connected components of a graph, largest first. Components of a single
    node are left out. Each component is an array of its nodes, int64, ascending.

    Args:
        count: number of nodes.
        first: one node of each edge.
        second: the other node of each edge.
    """
    labels = _labels(count, first, second)
    # Sort the nodes by component, and split them where the next component begins.
    order = np.argsort(labels, kind="stable")
    ends = np.flatnonzero(np.diff(labels[order])) + 1
    groups = [group for group in np.split(order, ends) if len(group) > 1]
    return sorted(groups, key=lambda group: (-len(group), group[0]))


def _labels(count: int, first: Ints, second: Ints) -> Ints:
    """Return the number of the component of each node, see `_components`."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array(
        (np.ones(len(first), dtype=np.int8), (first, second)), shape=(count, count)
    )
    labels: Ints = connected_components(edges, directed=False)[1]
    return labels
