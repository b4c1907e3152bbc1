"""The nearest-neighbour index over embeddings (SPEC.md section 10). Only this module imports FAISS.

Embeddings have unit norm, so the inner product is the cosine similarity. FAISS ids are row ids; holes are left out.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edje_index.errors import ModelError
from edje_index.indexing.faiss_file import FaissFileError, FaissShape, check_faiss_file
from storage_formats.atomic import fsync_path, fsync_paths, naming
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.checksum import crc32c_stream
from storage_formats.format.index_files import open_index_file
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import Manifest
from storage_formats.format.shard_table import FileEntry
from storage_formats.reading.embeddings import IndexedEmbeddings

FLAT_LIMIT = 100_000
"""Largest number of rows with an exact index: a scan of 100,000 x 768 takes about 10 ms on two cores."""
_TRAINING_VECTORS_PER_LIST = 64  # FAISS warns below 39 (Clustering::min_points_per_centroid)
_IVF_PROBES = 32
_PIECE_BYTES = 1 << 20  # read or written at once

Neighbours: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Row ids [k] and cosine similarities [k]."""


@name_missing_extra("search")
def check_faiss() -> None:
    """Raise MissingExtraError if FAISS is not installed; for jobs that need it only after hours of work."""
    import faiss  # noqa: F401


def add_ann(root: str | Path) -> Manifest:
    """Build the nearest-neighbour index of a finished index and commit it with a new `index.json`.

    For indexes that `IndexWriter` wrote, and to replace a damaged file. No other process may change the index at the
    same time.

    Example:
        >>> from edje_index import add_ann
        >>> add_ann("pages.edje").ann["kind"]
        'flat'

    Raises:
        UsageError, IncompleteIndexError, CorruptIndexError: as `Manifest.load`.
        MissingExtraError: FAISS is not installed.
    """
    manifest = Manifest.load(root)
    with name_missing_extra("search"):
        changed = replace(manifest, ann=build_ann(root, manifest.spec))
    changed.write(Layout(Path(root)))
    return changed


def build_ann(root: str | Path, spec: IndexSpec) -> dict[str, Any]:
    """Build `ann/index.faiss` from the committed embeddings and return its description for the manifest.

    The index is exact (flat) up to `FLAT_LIMIT` rows, and has inverted lists of exact vectors above. The same
    embeddings give the same bytes.

    Raises:
        OSError: the file cannot be written.
    """
    import faiss

    layout = Layout(Path(root))
    embeddings = IndexedEmbeddings(layout, spec)
    index = faiss.IndexIDMap2(_empty_index(embeddings))
    for rows, vectors in embeddings:
        index.add_with_ids(vectors, rows)
    layout.ann.mkdir(parents=True, exist_ok=True)
    temporary = layout.ann / "index.faiss.partial"
    temporary.unlink(missing_ok=True)  # it may be a link
    _write(index, temporary)
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
    """Finds the rows nearest to a query embedding.

    Raises:
        UsageError: the index has no nearest-neighbour index.
        CorruptIndexError: the file is missing or damaged, belongs to another index, or is not one that `build_ann`
            writes.
    """

    def __init__(self, root: str | Path) -> None:
        manifest = Manifest.load(root)
        layout = Layout(Path(root))
        ann_path = layout.relative(layout.ann_index)
        entry = next((entry for entry in manifest.ann_files if entry.path == ann_path), None)
        if entry is None:
            raise UsageError(f"{root} has no nearest-neighbour index; build it with edje_index.add_ann({str(root)!r})")
        spec = manifest.spec
        try:
            with open_index_file(root, layout.ann_index) as file:
                _check_bytes(file, entry)
                check_faiss_file(file, FaissShape(spec.embed_dim, vectors=manifest.counts.indexed, rows=spec.rows))
                self._index = _read(file)
        except (OSError, ValueError, RuntimeError) as error:  # FAISS raises RuntimeError
            reason = error.strerror if isinstance(error, OSError) else error
            raise CorruptIndexError(
                f"cannot read {layout.ann_index}: {reason}; run 'edje-index verify', or replace the file with "
                f"edje_index.add_ann({str(root)!r})"
            ) from error

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def nearest(self, query: NDArray[np.float32], k: int) -> Neighbours:
        """At most `k` rows nearest to `query` [embed_dim], best first."""
        return self.nearest_to_each(query[None], k)[0]

    def nearest_to_each(self, queries: NDArray[np.float32], k: int) -> list[Neighbours]:
        """At most `k` rows nearest to each of `queries` [q, embed_dim], best first.

        Raises:
            ModelError: the queries have another width than the embeddings.
        """
        if queries.shape[1] != self._index.d:
            raise ModelError(f"the query has {queries.shape[1]} dimensions, but the embeddings have {self._index.d}")
        scores, rows = self._index.search(queries.astype(np.float32), min(k, len(self)))
        filled = rows >= 0  # FAISS fills up with -1 if the probed lists hold fewer than k vectors
        return [(rows[query][filled[query]], scores[query][filled[query]]) for query in range(len(queries))]


def _check_bytes(file: BinaryIO, entry: FileEntry) -> None:
    """FaissFileError unless `file` is the one that was committed."""
    length = os.fstat(file.fileno()).st_size
    if length != entry.bytes:
        raise FaissFileError(f"it has {length} bytes instead of the {entry.bytes} in index.json")
    crc = crc32c_stream(file)
    if crc != entry.crc32c:
        raise FaissFileError(f"it has CRC-32C {crc:08x} instead of the {entry.crc32c:08x} in index.json")


def _read(file: BinaryIO) -> Any:
    """The FAISS index in `file`, which is read through Python: FAISS opens no file itself."""
    import faiss

    module: Any = faiss  # its stubs lack this class
    file.seek(0)
    return module.read_index(module.PyCallbackIOReader(file.read, _PIECE_BYTES))


def _write(index: Any, path: Path) -> None:
    """Write a FAISS index. FAISS itself reports no error if the disk is full when it closes the file."""
    import faiss

    module: Any = faiss  # its stubs lack this class
    with naming(path), open(path, "wb", buffering=0) as file:

        def write(data: bytes) -> None:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]

        module.write_index(index, module.PyCallbackIOWriter(write, _PIECE_BYTES))


def _empty_index(embeddings: IndexedEmbeddings) -> Any:
    """An index without vectors, trained for `embeddings`."""
    import faiss

    spec = embeddings.spec
    if spec.rows <= FLAT_LIMIT:
        return faiss.IndexFlatIP(spec.embed_dim)
    lists = 4 * math.isqrt(spec.rows)  # FAISS wiki, "Guidelines to choose an index": 4 to 16 sqrt(N)
    quantizer = faiss.IndexFlatIP(spec.embed_dim)
    index = faiss.IndexIVFFlat(quantizer, spec.embed_dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.train(_training_sample(embeddings, lists * _TRAINING_VECTORS_PER_LIST))
    index.nprobe = _IVF_PROBES
    return index


def _training_sample(embeddings: IndexedEmbeddings, count: int) -> NDArray[np.float32]:
    """About `count` vectors, every n-th row of the index, so that the order of the sources does not matter."""
    step = max(1, embeddings.spec.rows // count)
    return np.concatenate([vectors[rows % step == 0] for rows, vectors in embeddings])
