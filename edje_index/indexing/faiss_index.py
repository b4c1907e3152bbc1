"""The nearest-neighbour index over pooled embeddings: the only place that imports FAISS (SPEC.md section 10).

Embeddings have unit norm, so inner product is cosine similarity. Ids are row ids; holes are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edje_index.errors import ModelError
from storage_formats.atomic import fsync_path, fsync_paths
from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import FileEntry
from storage_formats.reading.embeddings import iter_embeddings

FLAT_LIMIT = 100_000
"""Up to this many vectors the index is exact: a scan of 100,000 x 768 takes some 10 ms on two cores."""
_TRAINING_VECTORS_PER_LIST = 64  # FAISS warns below 39 (Clustering::min_points_per_centroid)
_IVF_PROBES = 32


def build_ann(root: str | Path, spec: IndexSpec) -> dict[str, Any]:
    """Build `ann/index.faiss` from the committed embeddings and return its description for the manifest.

    Exact (flat) up to `FLAT_LIMIT` rows, inverted lists over unchanged vectors beyond; the same embeddings
    give the same bytes.
    """
    import faiss

    layout = Layout(Path(root))
    index = faiss.IndexIDMap2(_empty_index(root, spec))
    for rows, vectors in _indexed_vectors(root, spec):
        index.add_with_ids(vectors, rows)
    layout.ann.mkdir(parents=True, exist_ok=True)
    temporary = layout.ann / "index.faiss.partial"
    faiss.write_index(index, str(temporary))
    fsync_path(temporary)
    temporary.replace(layout.ann_index)
    fsync_paths([layout.ann])
    return {
        "kind": "flat" if spec.rows <= FLAT_LIMIT else "ivf-flat",
        "metric": "inner-product",
        "vectors": int(index.ntotal),
        "files": [FileEntry.of(layout, layout.ann_index).to_json()],
    }


class AnnIndex:
    """Nearest rows of a query embedding."""

    def __init__(self, root: str | Path) -> None:
        import faiss

        path = Layout(Path(root)).ann_index
        try:
            self._index = faiss.read_index(str(path))
        except RuntimeError as error:  # FAISS raises nothing more specific
            raise CorruptIndexError(f"cannot read {path}; run 'edje-index verify'") from error

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def nearest(self, query: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The at most `k` rows nearest to `query` [embed_dim] -> (row ids, cosine similarities), best first."""
        if query.shape != (self._index.d,):
            raise ModelError(f"the model embeds text in {query.shape[-1]} dimensions, the index has {self._index.d}")
        scores, rows = self._index.search(query[None].astype(np.float32), min(k, len(self)))
        found = rows[0] >= 0
        return rows[0][found], scores[0][found]


def _empty_index(root: str | Path, spec: IndexSpec) -> Any:
    """A trained index without vectors."""
    import faiss

    if spec.rows <= FLAT_LIMIT:
        return faiss.IndexFlatIP(spec.embed_dim)
    lists = 4 * math.isqrt(spec.rows)  # FAISS wiki, "Guidelines to choose an index": 4 to 16 sqrt(N)
    quantizer = faiss.IndexFlatIP(spec.embed_dim)
    index = faiss.IndexIVFFlat(quantizer, spec.embed_dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.train(_training_sample(root, spec, lists * _TRAINING_VECTORS_PER_LIST))
    index.nprobe = _IVF_PROBES
    return index


def _training_sample(root: str | Path, spec: IndexSpec, count: int) -> NDArray[np.float32]:
    """About `count` vectors, every n-th row of the whole index, so that order in the sources does not matter."""
    step = max(1, spec.rows // count)
    return np.concatenate([vectors[rows % step == 0] for rows, vectors in _indexed_vectors(root, spec)])


def _indexed_vectors(root: str | Path, spec: IndexSpec) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """(row ids [k], embeddings [k, embed_dim]) of each shard without its holes."""
    for first_row, vectors in iter_embeddings(root, spec):
        indexed = np.flatnonzero(~np.isnan(vectors[:, 0]))
        yield indexed + first_row, vectors[indexed]
