"""Trains, fills, searches, reads and writes one FAISS index of `ann/`. Only this module imports FAISS."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edje_index.indexing.ann_kind import AnnKind
from edje_index.indexing.faiss_file import FaissFileError, FaissShape, check_faiss_file
from edje_index.progress import OnProgress
from storage_formats.atomic import naming
from storage_formats.extras import name_missing_extra
from storage_formats.format.checksum import crc32c_stream
from storage_formats.format.shard_table import FileEntry
from storage_formats.reading.embeddings import IndexedEmbeddings

FaissIndex: TypeAlias = Any  # the stubs of FAISS lack most of its classes
Vectors: TypeAlias = NDArray[np.float32]

DEFAULT_PROBES = 32
_CODES = 16  # of each sub-vector: 4 bits
_TRAINING_VECTORS_PER_LIST = 64  # FAISS warns below 39 (Clustering::min_points_per_centroid)
_M_MMAP_THRESHOLD = -3  # malloc.h
_MAPPED_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20  # read or written at once


@name_missing_extra("search")
def check_faiss() -> None:
    """Raise MissingExtraError if FAISS is not installed."""
    import faiss  # noqa: F401


def train_part(kind: AnnKind, embeddings: IndexedEmbeddings, rows: int) -> FaissIndex:
    """Train a FAISS index on a sample of `embeddings`. The returned FAISS index is empty.

    If FAISS can use GPUs, they compute the centroids, unless their memory is too small.

    If the sample has fewer vectors than `kind` has centroids, the FAISS index is flat.

    Args:
        kind: kind of FAISS index.
        embeddings: stored embeddings.
        rows: number of rows that the FAISS index will contain.
    """
    import faiss

    width = embeddings.spec.embed_dim
    if kind.lists:
        sample = _training_sample(embeddings, kind, rows)
        if len(sample) >= max(kind.lists, _CODES if kind.sub_vectors else 0):
            centroids = _on_gpus(faiss.IndexFlatIP(width))
            try:
                return _trained(kind, sample, centroids)
            except RuntimeError:
                if centroids is None:
                    raise
            return _trained(kind, sample, None)
    return faiss.IndexIDMap2(faiss.IndexFlatIP(width))


def _trained(kind: AnnKind, sample: Vectors, centroids: FaissIndex | None) -> FaissIndex:
    """Train a FAISS index on `sample`. The flat index `centroids` compares vectors, if it is not None."""
    import faiss

    index: FaissIndex = faiss.index_factory(sample.shape[1], kind.factory, faiss.METRIC_INNER_PRODUCT)
    index.clustering_index = centroids  # FAISS keeps no reference
    index.train(sample)
    index.clustering_index = None
    index.nprobe = min(DEFAULT_PROBES, kind.lists)
    return index


def without_vectors(index: FaissIndex) -> FaissIndex:
    """Remove all vectors from `index`, and return `index` with its trained centroids.

    Return None for a flat index, which has no centroids.
    """
    if not _is_inverted(index):
        return None
    index.reset()
    return index


def fill_part(index: FaissIndex, embeddings: IndexedEmbeddings, on_progress: OnProgress | None = None) -> None:
    """Add `embeddings` to `index`, shard by shard. The FAISS ids are the row ids.

    If FAISS can use GPUs, they find the inverted list of each vector, unless their memory is too small.
    """
    _return_freed_memory()
    with _quantizer_on_gpus(index) as leave_gpus:
        for done, (row_ids, vectors) in enumerate(embeddings, 1):
            vectors_before = index.ntotal
            try:
                index.add_with_ids(vectors, row_ids)
            except RuntimeError:
                if index.ntotal != vectors_before or not leave_gpus():
                    raise
                index.add_with_ids(vectors, row_ids)
            if on_progress:
                on_progress("adding embeddings", done, len(embeddings.shards))


def search_part(
    index: FaissIndex, queries: Vectors, k: int, *, probes: int | None, live: NDArray[np.uint8] | None
) -> tuple[Vectors, NDArray[np.int64]]:
    """Search one FAISS index. Return (scores, row ids), best first, [q, min(k, vectors)] each.

    If fewer rows are found, the remaining row ids are -1.

    Args:
        index: FAISS index.
        queries: query embeddings [q, embed_dim].
        k: number of rows per query.
        probes: number of inverted lists to search; None uses the number in the file.
        live: bitmap of the rows to search, one bit per row, lowest bit first; None searches all rows.
    """
    import faiss

    module: Any = faiss
    k = min(k, int(index.ntotal))
    selector = None if live is None else module.IDSelectorBitmap(live)
    inner = module.downcast_index(index.index) if hasattr(index, "id_map") else index
    if isinstance(inner, module.IndexIVF):
        probes = min(probes or int(inner.nprobe), int(inner.nlist))
        parameters = module.SearchParametersIVF(nprobe=probes, sel=selector)
    else:
        parameters = module.SearchParameters(sel=selector)
    scores, rows = index.search(queries, k, params=parameters)
    return scores, rows


def is_exact(index: FaissIndex) -> bool:
    """Return True if `index` stores exact vectors, so that scores are exact inner products."""
    return not hasattr(index, "pq")


def number_of_lists(index: FaissIndex) -> int:
    """Return the number of inverted lists; 0 for a flat index."""
    return int(index.nlist) if _is_inverted(index) else 0


def centroid_similarity(index: FaissIndex, vectors: Vectors) -> float | None:
    """Return the mean inner product of each vector and its nearest centroid; None for a flat index."""
    if not _is_inverted(index) or not len(vectors):
        return None
    similarities, _ = index.quantizer.search(vectors, 1)
    return float(similarities.mean())


def read_part(file: BinaryIO, entry: FileEntry, shape: FaissShape) -> FaissIndex:
    """Check and load a FAISS file. Python reads the file, so FAISS cannot open other files.

    Args:
        file: the open FAISS file.
        entry: entry of the file in `index.json`.
        shape: expected sizes.

    Raises:
        FaissFileError: the file does not match `entry` or `shape`.
        RuntimeError: FAISS cannot read the file.
    """
    import faiss

    module: Any = faiss
    length = os.fstat(file.fileno()).st_size
    if length != entry.bytes:
        raise FaissFileError(f"the FAISS file has {length} bytes instead of the {entry.bytes} in index.json")
    crc = crc32c_stream(file)
    if crc != entry.crc32c:
        raise FaissFileError(
            f"the FAISS file is damaged or was replaced: its CRC-32C is {crc:08x}, "
            f"but index.json has {entry.crc32c:08x}"
        )
    check_faiss_file(file, shape)
    file.seek(0)
    return module.read_index(module.PyCallbackIOReader(file.read, _PIECE_BYTES))


def write_part(index: FaissIndex, path: Path) -> None:
    """Write a FAISS index to `path`."""
    # Python writes the file, because FAISS reports no error if the disk is full when it closes a file.
    import faiss

    module: Any = faiss
    with naming(path), open(path, "wb", buffering=0) as file:

        def write(data: bytes) -> None:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]

        module.write_index(index, module.PyCallbackIOWriter(write, _PIECE_BYTES))


def _return_freed_memory() -> None:
    """Make glibc return freed memory to the system when FAISS enlarges its lists. Other C libraries need no setting."""
    # glibc raises its limit for separate mappings when a large array is freed, and then keeps the pieces of old lists.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _on_gpus(index: FaissIndex) -> FaissIndex | None:
    """Return a copy of a flat FAISS index on all GPUs. Return None if FAISS can use no GPU."""
    import faiss

    module: Any = faiss
    if not module.get_num_gpus():  # 0 in builds of FAISS for CPUs
        return None
    with contextlib.suppress(RuntimeError):  # other processes may have taken the memory of the GPUs
        return module.index_cpu_to_all_gpus(index)
    return None


@contextlib.contextmanager
def _quantizer_on_gpus(index: FaissIndex) -> Iterator[Callable[[], bool]]:
    """Context manager in which GPUs compare vectors with the centroids of `index`, if FAISS can use GPUs.

    It yields a function that returns the work to the CPU, and returns False if the CPU has done the work before.
    """
    # FAISS has no index of 4-bit fast-scan codes on GPUs, so the codes and their lists stay on the CPU.
    own_quantizer = index.quantizer if _is_inverted(index) else None
    copy = None if own_quantizer is None else _on_gpus(own_quantizer)
    if copy is None:
        yield lambda: False
        return
    index.quantizer = copy

    def leave_gpus() -> bool:
        was_on_gpus = int(index.quantizer.this) == int(copy.this)
        index.quantizer = own_quantizer
        return was_on_gpus

    try:
        yield leave_gpus
    finally:
        leave_gpus()


def _is_inverted(index: FaissIndex) -> bool:
    return hasattr(index, "nlist")


def _training_sample(embeddings: IndexedEmbeddings, kind: AnnKind, rows: int) -> Vectors:
    """Return the vectors of every n-th row of the whole index.

    n is even, so odd rows are never used for training. They serve as queries to measure recall and drift.
    """
    step = max(2, rows // (kind.lists * _TRAINING_VECTORS_PER_LIST) // 2 * 2)
    return np.concatenate([vectors[row_ids % step == 0] for row_ids, vectors in embeddings])
