"""The nearest-neighbour index over embeddings (SPEC.md section 10). Only this module imports FAISS.

Embeddings have unit norm, so the inner product is the cosine similarity. FAISS ids are row ids. Holes have no vector.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
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
from storage_formats.format.checksum import crc32c_file, crc32c_stream
from storage_formats.format.index_files import open_index_file
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.shard_table import FileEntry
from storage_formats.reading.embeddings import IndexedEmbeddings
from storage_formats.writing.snapshots import kept_snapshots, named_files

FLAT_LIMIT = 100_000
"""Largest number of rows with an exact index: a scan of 100,000 x 768 takes about 10 ms on two cores."""
_TRAINING_VECTORS_PER_LIST = 64  # FAISS warns below 39 (Clustering::min_points_per_centroid)
_IVF_PROBES = 32
_PIECE_BYTES = 1 << 20  # read or written at once

Neighbours: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Row ids [k] and cosine similarities [k]."""


@name_missing_extra("search")
def check_faiss() -> None:
    """Raise MissingExtraError if FAISS is not installed."""
    import faiss  # noqa: F401


def add_ann(root: str | Path) -> Manifest:
    """Build the nearest-neighbour index of a finished index, and commit it.

    No other process may change the index at the same time.

    Example:
        >>> from edje_index import add_ann
        >>> add_ann("pages.edje").ann["kind"]
        'flat'

    Raises:
        UsageError, IncompleteIndexError, CorruptIndexError: as in `Manifest.load`.
        MissingExtraError: FAISS is not installed.
    """
    manifest, layout = Manifest.load(root), Layout(Path(root))
    with name_missing_extra("search"):
        # Earlier snapshots name the existing file, so the new one needs another name.
        ann = build_ann(root, manifest.spec, replace_file=not manifest.snapshot.number)
    changed = replace(manifest, ann=ann)
    changed.write(layout)
    named = named_files(layout, kept_snapshots(CommittedIndex(layout.root, changed)))
    for path in layout.ann.glob("index-*.faiss"):
        if layout.relative(path) not in named:
            path.unlink()
    return changed


def build_ann(root: str | Path, spec: IndexSpec, *, replace_file: bool = True) -> dict[str, Any]:
    """Build the FAISS index of the committed embeddings, and return its description for the manifest.

    The FAISS index is exact (flat) up to `FLAT_LIMIT` rows, and has inverted lists of exact vectors above.

    Args:
        root: directory of the index.
        spec: shape of the index.
        replace_file: True writes `ann/index.faiss`, replacing an existing file. False writes a file with a new name.

    Raises:
        OSError: the file cannot be written.
    """
    layout = Layout(Path(root))
    file = _write_part(layout, spec, list(spec.shard_numbers()), layout.ann_index if replace_file else None)
    vectors = file.pop("vectors") if replace_file else file["vectors"]
    kind = "flat" if spec.used_rows <= FLAT_LIMIT else "ivf-flat"
    return {"kind": kind, "metric": "inner-product", "vectors": vectors, "files": [file]}


def extend_ann(layout: Layout, spec: IndexSpec, ann: dict[str, Any]) -> dict[str, Any]:
    """Add the last segment of `spec` to the nearest-neighbour index, in a further FAISS file.

    Returns:
        The description of all FAISS files for the manifest; `ann` if the index has no nearest-neighbour index.

    Raises:
        OSError: the file cannot be written.
    """
    if not ann.get("files"):
        return ann
    part = _write_part(layout, spec, spec.segment_shards(spec.used_segments[-1]))
    parts = [{"vectors": ann["vectors"], **file} for file in ann["files"]]
    return {**ann, "vectors": ann["vectors"] + part["vectors"], "files": [*parts, part]}


def _write_part(layout: Layout, spec: IndexSpec, shards: Sequence[int], path: Path | None = None) -> dict[str, Any]:
    """Write the FAISS index of `shards`, and return the entry of this file in the manifest."""
    import faiss

    rows = sum(len(spec.shard_rows(shard)) for shard in shards)
    embeddings = IndexedEmbeddings(layout, spec, shards)
    index = faiss.IndexIDMap2(_empty_index(embeddings, rows))
    for row_ids, vectors in embeddings:
        index.add_with_ids(vectors, row_ids)
    layout.ann.mkdir(parents=True, exist_ok=True)
    temporary = layout.ann / "index.faiss.partial"
    temporary.unlink(missing_ok=True)  # it may be a link
    _write(index, temporary)
    fsync_path(temporary)
    if path is None:
        path = layout.ann_part(crc32c_file(temporary)[1])
    temporary.replace(path)
    fsync_paths([layout.ann])
    return {**FileEntry.of(layout, path).to_json(), "vectors": int(index.ntotal)}


class AnnIndex:
    """Finds the rows nearest to a query embedding. Deleted rows are left out.

    Args:
        index: an open index. To open an index by its directory, call `AnnIndex.open`.

    Raises:
        UsageError: the index has no nearest-neighbour index.
        CorruptIndexError: a FAISS file is missing or damaged, belongs to another index, or is not one that `build_ann`
            writes.
    """

    def __init__(self, index: CommittedIndex) -> None:
        files = index.manifest.ann.get("files", [])
        if not files:
            root = str(index.root)
            raise UsageError(f"{root} has no nearest-neighbour index; build it with edje_index.add_ann({root!r})")
        self._parts = [_open_part(index, file) for file in files]
        self._live = _live_bitmap(index)

    @classmethod
    def open(cls, root: str | Path) -> AnnIndex:
        """Open the nearest-neighbour index of the index at `root`. Also raises the errors of `Manifest.load`."""
        return cls(CommittedIndex.open(root))

    def __len__(self) -> int:
        return sum(int(part.ntotal) for part in self._parts)

    def nearest(self, query: NDArray[np.float32], k: int) -> Neighbours:
        """Return at most `k` rows nearest to `query` [embed_dim], best first."""
        return self.nearest_to_each(query[None], k)[0]

    def nearest_to_each(self, queries: NDArray[np.float32], k: int) -> list[Neighbours]:
        """Return at most `k` rows nearest to each of `queries` [q, embed_dim], best first.

        Raises:
            ModelError: the queries and the embeddings differ in width.
        """
        width = self._parts[0].d
        if queries.shape[1] != width:
            raise ModelError(
                f"the query has width {queries.shape[1]}, but the embeddings of the index have width {width}; "
                "use the model that built the index"
            )
        results = [self._search(part, queries.astype(np.float32), k) for part in self._parts if part.ntotal]
        scores, rows = (np.concatenate(values, axis=1) for values in zip(*results, strict=True))
        if len(results) > 1:
            order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            scores, rows = np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
        filled = rows >= 0  # FAISS fills up with -1 if the probed lists hold fewer than k vectors
        return [(rows[query][filled[query]], scores[query][filled[query]]) for query in range(len(queries))]

    def _search(self, part: Any, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and row ids [q, k], best first. Missing results have row id -1."""
        k = min(k, int(part.ntotal))
        if self._live is None:
            scores, rows = part.search(queries, k)
            return scores, rows
        import faiss

        module: Any = faiss  # its stubs lack these classes
        selector = module.IDSelectorBitmap(self._live)
        inner = module.downcast_index(part.index)
        if isinstance(inner, module.IndexIVF):
            parameters = module.SearchParametersIVF(sel=selector, nprobe=inner.nprobe)
        else:
            parameters = module.SearchParameters(sel=selector)
        scores, rows = part.search(queries, k, params=parameters)
        return scores, rows


def _open_part(index: CommittedIndex, file: dict[str, Any]) -> Any:
    manifest, entry = index.manifest, FileEntry.from_json(file)
    path, vectors = index.root / entry.path, int(file.get("vectors", manifest.counts.indexed))
    try:
        with open_index_file(index.root, path) as opened:
            _check_bytes(opened, entry)
            check_faiss_file(opened, FaissShape(manifest.spec.embed_dim, vectors=vectors, rows=manifest.spec.rows))
            return _read(opened)
    except (OSError, ValueError, RuntimeError) as error:  # FAISS raises RuntimeError
        reason = error.strerror if isinstance(error, OSError) else error
        raise CorruptIndexError(
            f"cannot read {path}: {reason}; run 'edje-index verify', or replace the file with "
            f"edje_index.add_ann({str(index.root)!r})"
        ) from error


def _live_bitmap(index: CommittedIndex) -> NDArray[np.uint8] | None:
    """Return a bitmap of the rows that are not deleted, lowest bit first. None if no row is deleted."""
    deleted = index.deleted
    if not len(deleted):
        return None
    is_live = np.ones(index.manifest.spec.rows, dtype=np.bool_)
    is_live[deleted.row_ids()] = False
    return np.packbits(is_live, bitorder="little")


def _check_bytes(file: BinaryIO, entry: FileEntry) -> None:
    length = os.fstat(file.fileno()).st_size
    if length != entry.bytes:
        raise FaissFileError(f"the FAISS file has {length} bytes instead of the {entry.bytes} in index.json")
    crc = crc32c_stream(file)
    if crc != entry.crc32c:
        raise FaissFileError(
            f"the FAISS file has the CRC-32C {crc:08x} instead of the {entry.crc32c:08x} in index.json"
        )


def _read(file: BinaryIO) -> Any:
    """Load the FAISS index from `file`. Python reads the file, so that FAISS opens no file itself."""
    import faiss

    module: Any = faiss  # its stubs lack this class
    file.seek(0)
    return module.read_index(module.PyCallbackIOReader(file.read, _PIECE_BYTES))


def _write(index: Any, path: Path) -> None:
    """Write a FAISS index to `path`."""
    # Python writes the file, because FAISS reports no error if the disk is full when it closes a file.
    import faiss

    module: Any = faiss  # its stubs lack this class
    with naming(path), open(path, "wb", buffering=0) as file:

        def write(data: bytes) -> None:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]

        module.write_index(index, module.PyCallbackIOWriter(write, _PIECE_BYTES))


def _empty_index(embeddings: IndexedEmbeddings, rows: int) -> Any:
    """Return an index without vectors. Inverted lists are trained on a sample of `embeddings`."""
    import faiss

    width = embeddings.spec.embed_dim
    if rows <= FLAT_LIMIT:
        return faiss.IndexFlatIP(width)
    lists = 4 * math.isqrt(rows)  # FAISS wiki, "Guidelines to choose an index": 4 to 16 sqrt(N)
    quantizer = faiss.IndexFlatIP(width)
    index = faiss.IndexIVFFlat(quantizer, width, lists, faiss.METRIC_INNER_PRODUCT)
    index.train(_training_sample(embeddings, rows // (lists * _TRAINING_VECTORS_PER_LIST)))
    index.nprobe = _IVF_PROBES
    return index


def _training_sample(embeddings: IndexedEmbeddings, step: int) -> NDArray[np.float32]:
    return np.concatenate([vectors[rows % max(1, step) == 0] for rows, vectors in embeddings])
