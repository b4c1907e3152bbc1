"""The nearest-neighbour index of the embeddings (SPEC.md section 10). Only this module
imports FAISS.

Embeddings have the length 1, so inner products are cosine similarities. FAISS ids are
row ids. Holes have no vector. A build writes one FAISS file, and each append writes one
more: a part of the nearest-neighbour index.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edje_index.errors import ModelError
from edje_index.indexing.ann_kind import AnnKind
from edje_index.indexing.faiss_file import FaissFileError, check_faiss_file
from edje_index.progress import OnProgress
from storage_formats.arrays import as_finite
from storage_formats.atomic import fsync_path, fsync_paths, make_directories, naming
from storage_formats.change import Change, begin_change
from storage_formats.errors import UsageError, cannot_read
from storage_formats.extras import name_missing_extra
from storage_formats.format.checksum import crc32c_file, crc32c_stream
from storage_formats.format.index_files import open_index_file
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.shard_table import FileEntry
from storage_formats.reading.embeddings import IndexedEmbeddings

TARGET_RECALL = 0.95
_RECALL_QUERIES = 200
_RECALL_NEIGHBOURS = 100
_LEAST_PROBES = 4
_DEFAULT_PROBES = 32
# of each sub-vector: 4 bits
_CODES = 16
# FAISS warns below 39 (Clustering::min_points_per_centroid)
_TRAINING_VECTORS_PER_LIST = 64
# their mean distance from the centroids varies by about 1 % from sample to sample
_DRIFT_ROWS = 2000
_CANDIDATES_PER_NEIGHBOUR = 2
"""Number of candidates per requested row if FAISS stores codes. Their stored
embeddings are then compared.
"""
# 50 MB of embeddings of 384 values
_ROWS_AT_ONCE = 1 << 15
# of a FAISS file, read or written at once
_PIECE_BYTES = 1 << 20
# malloc.h
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 64 << 10

# the stubs of FAISS lack most of its classes
_FaissIndex: TypeAlias = Any
_Vectors: TypeAlias = NDArray[np.float32]
Neighbours: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Row ids [k] and cosine similarities [k]."""


@name_missing_extra("search")
def check_faiss() -> None:
    """Raise MissingExtraError if FAISS is not installed."""
    import faiss  # noqa: F401


@dataclass(frozen=True)
class AnnRequest:
    """Requested kind and recall of a nearest-neighbour index.

    Attributes:
        ann: FAISS factory string, see `AnnKind.parse`; "auto" chooses the kind by the
            number of rows.
        recall: recall to reach for the 100 nearest rows, above 0 and at most 1.
        memory: memory in bytes that the build may use; None for no limit. See
            `AnnKind.choose`.
    """

    ann: str = "auto"
    recall: float = TARGET_RECALL
    memory: int | None = None

    @classmethod
    def like(cls, ann: Mapping[str, Any]) -> AnnRequest:
        """Return a request for the kind and the recall of an existing index, from
        `ann` in `index.json`.
        """
        kind = (
            "Flat" if ann.get("kind") == AnnKind().name else ann.get("factory", "auto")
        )
        return cls(kind, ann.get("recall", {}).get("target", TARGET_RECALL))


def add_ann(
    root: str | Path,
    request: AnnRequest = AnnRequest(),
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Build the nearest-neighbour index of a finished index, and commit the result.

    Examples:
        >>> from edje_index import add_ann
        >>> add_ann("pages.edje").ann["kind"]
        'flat'

    Raises:
        UsageError, IncompleteIndexError, CorruptIndexError: as for `Manifest.load`.
        UsageError: `request` is invalid.
        MissingExtraError: FAISS is not installed.
    """
    with name_missing_extra("search"), begin_change(root, "ann build") as change:
        return replace_ann(change, request, on_progress)


def replace_ann(
    change: Change, request: AnnRequest, on_progress: OnProgress | None = None
) -> Manifest:
    """Build the nearest-neighbour index of the index that `change` changes, and
    commit the result. See `add_ann`.
    """
    assert change.index is not None
    manifest = change.index.manifest
    layout = change.layout
    # Readers may need the file `ann/index.faiss`: the current snapshot until the
    # commit, and earlier ones afterwards.
    in_use = bool(manifest.snapshot.number)
    if not in_use:
        committed = {file.path: file for file in manifest.ann_files}.get(
            layout.relative(layout.ann_index)
        )
        with (
            contextlib.suppress(OSError),
            open_index_file(layout.root, layout.ann_index) as file,
        ):
            in_use = committed is not None and crc32c_stream(file) == committed.crc32c
    ann = build_ann(
        layout.root,
        manifest.spec,
        replace_file=not in_use,
        request=request,
        on_progress=on_progress,
    )
    changed = change.commit(replace(manifest, ann=ann)).manifest
    change.remove_files()
    return changed


def build_ann(
    root: str | Path,
    spec: IndexSpec,
    *,
    replace_file: bool = True,
    request: AnnRequest = AnnRequest(),
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Build the FAISS index of the committed embeddings. Return the description of the
    FAISS index for the manifest.

    The recall is measured against exact search. The description contains the number of
    inverted lists that a search must read to reach `request.recall`. If there are too
    few vectors for the kind, the FAISS index is flat.

    Args:
        replace_file: True to write, or overwrite, `ann/index.faiss`. False to write a
            file with a new name.

    Raises:
        UsageError: `request` is invalid, or the FAISS index needs more memory than
            `request.memory`.
    """
    if not 0 < request.recall <= 1:
        raise UsageError(
            f"the target recall must be above 0 and at most 1, got {request.recall}",
            parameter="recall",
        )
    layout = Layout(Path(root))
    width = spec.embed_dim
    if request.ann == "auto":
        kind = AnnKind.choose(spec.used_rows, width, request.memory)
    else:
        kind = AnnKind.parse(request.ann, width)
    kind.check_memory(spec.used_rows, width, request.memory)
    embeddings = IndexedEmbeddings(layout, spec, list(spec.shard_numbers()))
    index = _trained(kind, embeddings, spec.used_rows)
    _fill(index, embeddings, on_progress)
    measured: dict[str, Any] = {}
    if lists := _lists(index):
        measured = {
            "factory": kind.factory,
            **_measure(index, lists, embeddings, request.recall, on_progress),
        }
    else:
        kind = AnnKind()
    file = _write(layout, index, layout.ann_index if replace_file else None, embeddings)
    vectors = file["vectors"]
    if replace_file and not lists:
        # as in format version 1.0
        del file["vectors"]
    return {
        "kind": kind.name,
        "metric": "inner-product",
        "vectors": vectors,
        "files": [file],
        **measured,
    }


def extend_ann(layout: Layout, spec: IndexSpec, ann: dict[str, Any]) -> dict[str, Any]:
    """Write the last segment of `spec` to a new FAISS file.

    If the first FAISS file has inverted lists, the new file uses the same centroids and
    codes.

    Returns:
        The description of all FAISS files for the manifest. `ann` is returned unchanged
        if the index has no nearest-neighbour index.
    """
    if not ann.get("files"):
        return ann
    segment = spec.used_segments[-1]
    embeddings = IndexedEmbeddings(layout, spec, spec.segment_shards(segment))
    files = [{"vectors": ann["vectors"], **file} for file in ann["files"]]
    index = _open_part(layout.root, spec, files[0])
    if _lists(index):
        # keeps the centroids
        index.reset()
    else:
        index = _trained(
            AnnKind.choose(segment.rows, spec.embed_dim), embeddings, segment.rows
        )
    _fill(index, embeddings)
    file = _write(layout, index, None, embeddings)
    return {**ann, "vectors": ann["vectors"] + file["vectors"], "files": [*files, file]}


def ann_without_rows(index: CommittedIndex, row_ids: Sequence[int]) -> dict[str, Any]:
    """Remove the rows `row_ids` from all FAISS files. A file that contains one of these
    rows is written again.

    The centroids are not changed.

    Returns:
        The description of all FAISS files for the manifest.
    """
    layout = Layout(index.root)
    ann = index.manifest.ann
    files = []
    for file in ({"vectors": ann["vectors"], **file} for file in ann.get("files", [])):
        part = _open_part(index.root, index.manifest.spec, file)
        if part.remove_ids(np.array(row_ids, dtype=np.int64)):
            file = {**file, **_write(layout, part, None)}
        files.append(file)
    return (
        {**ann, "vectors": sum(file["vectors"] for file in files), "files": files}
        if files
        else ann
    )


def _trained(kind: AnnKind, embeddings: IndexedEmbeddings, rows: int) -> _FaissIndex:
    """Return an empty FAISS index of `kind` for `rows` embeddings, with trained
    centroids.

    The training sample is every n-th row of the whole index. n is even, so odd rows are
    never used for training. They serve as queries to measure recall and drift.
    """
    import faiss

    width = embeddings.spec.embed_dim
    if kind.lists:
        step = max(2, rows // (kind.lists * _TRAINING_VECTORS_PER_LIST) // 2 * 2)
        sample = np.concatenate(
            [vectors[row_ids % step == 0] for row_ids, vectors in embeddings]
        )
        if len(sample) >= max(kind.lists, _CODES if kind.sub_vectors else 0):
            for centroids in (_on_gpus(faiss.IndexFlatIP(width)), None):
                index: _FaissIndex = faiss.index_factory(
                    width, kind.factory, faiss.METRIC_INNER_PRODUCT
                )
                # compares vectors while the centroids are computed
                index.clustering_index = centroids
                try:
                    index.train(sample)
                except RuntimeError:
                    if centroids is None:
                        raise
                    # the memory of the GPUs has ended
                    continue
                # FAISS keeps no reference to it
                index.clustering_index = None
                index.nprobe = min(_DEFAULT_PROBES, kind.lists)
                return index
    return faiss.IndexIDMap2(faiss.IndexFlatIP(width))


def _fill(
    index: _FaissIndex,
    embeddings: IndexedEmbeddings,
    on_progress: OnProgress | None = None,
) -> None:
    """Add `embeddings` to the empty `index`, shard by shard. The FAISS ids are the
    row ids.
    """
    # glibc raises its limit for separate mappings when a large array is freed, and then
    # keeps the pieces of old lists. other C libraries need no setting
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)

    def add_all() -> None:
        for done, (row_ids, vectors) in enumerate(embeddings, 1):
            index.add_with_ids(vectors, row_ids)
            if on_progress:
                on_progress("adding embeddings", done, len(embeddings.shards))

    # finds the inverted list of a vector
    own = index.quantizer if _lists(index) else None
    copy = None if own is None else _on_gpus(own)
    if copy is not None:
        index.quantizer = copy
        try:
            return add_all()
        except RuntimeError:
            # the memory of the GPUs has ended: begin again on the CPU
            index.reset()
        finally:
            index.quantizer = own
    add_all()


def _on_gpus(flat: _FaissIndex) -> _FaissIndex | None:
    """Return a copy of a flat FAISS index on all GPUs. Return None if FAISS can use no
    GPU.

    The GPUs train the centroids and find the inverted list of each vector. Codes, their
    lists and searches stay on the CPU, because FAISS has neither 4-bit fast-scan codes
    nor filters of rows on GPUs.
    """
    import faiss

    module: Any = faiss
    # 0 in builds of FAISS for CPUs
    if not module.get_num_gpus():
        return None
    # other processes may have taken the memory of the GPUs
    with contextlib.suppress(RuntimeError):
        return module.index_cpu_to_all_gpus(flat)
    return None


def _lists(index: _FaissIndex) -> int:
    """Return the number of inverted lists; 0 for a flat index."""
    return int(index.nlist) if hasattr(index, "nlist") else 0


def _measure(
    index: _FaissIndex,
    lists: int,
    embeddings: IndexedEmbeddings,
    target: float,
    on_progress: OnProgress | None,
) -> dict[str, Any]:
    """Measure the recall of `index` with increasing numbers of probes until it reaches
    `target`.

    Return the keys `probes` and `recall` of `ann` in `index.json`; empty if no row is
    indexed.
    """
    row_ids, queries, neighbours = recall_queries(embeddings, on_progress)
    if not len(row_ids):
        return {}
    probes = min(_LEAST_PROBES, lists)
    recall = 0.0
    while True:
        results = _nearest(
            [index],
            embeddings,
            queries,
            _RECALL_NEIGHBOURS + 1,
            probes=probes,
            live=None,
        )
        shares = []
        for row_id, (rows, _), exact in zip(row_ids, results, neighbours, strict=True):
            others = rows[rows != row_id][:_RECALL_NEIGHBOURS]
            shares.append(len(np.intersect1d(others, exact)) / max(1, len(exact)))
        recall = float(np.mean(shares))
        if recall >= target or probes >= lists:
            break
        probes = min(2 * probes, lists)
    measured = {
        "k": _RECALL_NEIGHBOURS,
        "queries": len(row_ids),
        "value": round(recall, 4),
        "target": target,
    }
    return {"probes": probes, "recall": measured}


def recall_queries(
    embeddings: IndexedEmbeddings, on_progress: OnProgress | None = None
) -> tuple[NDArray[np.int64], _Vectors, list[NDArray[np.int64]]]:
    """Draw rows as queries from all shards, and find the 100 nearest other rows of each
    query by exact search.

    Return the row ids and the embeddings of the queries, and the row ids of the
    neighbours of each query.
    """
    row_ids, queries = held_out(embeddings, _RECALL_QUERIES)
    best: list[Neighbours] = [
        (np.empty(0, np.int64), np.empty(0, np.float32)) for _ in row_ids
    ]
    for done, (rows, vectors) in enumerate(embeddings, 1):
        if on_progress:
            on_progress("measuring the recall", done, len(embeddings.shards))
        scores = queries @ vectors.T
        for query, row_id in enumerate(row_ids):
            others = rows != row_id
            if (
                len(best[query][1]) < _RECALL_NEIGHBOURS
                or scores[query].max() > best[query][1][-1]
            ):
                best[query] = _best(
                    best[query],
                    (rows[others], scores[query, others]),
                    _RECALL_NEIGHBOURS,
                )
    return row_ids, queries, [rows for rows, _ in best]


def held_out(
    embeddings: IndexedEmbeddings, count: int
) -> tuple[NDArray[np.int64], _Vectors]:
    """Return row ids and embeddings of at most `count` rows from all shards.

    The row ids are odd, because FAISS is trained on even row ids only. As an exception,
    the last row id of a segment may be even.
    """
    spec = embeddings.spec
    rng = np.random.default_rng(0)
    shards = [
        embeddings.shards[int(i)]
        for i in np.linspace(0, len(embeddings.shards) - 1, count)
    ]
    row_ids = np.empty(count, dtype=np.int64)
    for number, shard in enumerate(shards):
        rows = spec.shard_rows(shard)
        row_ids[number] = min(
            int(rng.integers(rows.start, rows.stop)) | 1, rows.stop - 1
        )
    row_ids = np.unique(row_ids)
    vectors = embeddings[row_ids]
    indexed = ~np.isnan(vectors[:, 0])
    return row_ids[indexed], vectors[indexed]


def _write(
    layout: Layout,
    index: _FaissIndex,
    path: Path | None,
    embeddings: IndexedEmbeddings | None = None,
) -> dict[str, Any]:
    """Write a FAISS index to `path`, and return the entry of the file for the manifest.

    If `path` is None, the file is named after its checksum. If the FAISS index has
    inverted lists and `embeddings` is given, the entry contains the mean inner product
    of a sample of the embeddings and their nearest centroids.
    """
    make_directories(layout.ann)
    temporary = layout.ann / "index.faiss.partial"
    # the old file may be a link
    temporary.unlink(missing_ok=True)
    try:
        write_part(index, temporary)
        fsync_path(temporary)
        if path is None:
            path = layout.ann_part(crc32c_file(temporary)[1])
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_paths([layout.ann])
    entry = {**FileEntry.of(layout, path).to_json(), "vectors": int(index.ntotal)}
    if embeddings is not None and _lists(index):
        vectors = held_out(embeddings, _DRIFT_ROWS)[1]
        if len(vectors):
            entry["similarity"] = round(
                float(index.quantizer.search(vectors, 1)[0].mean()), 4
            )
    return entry


def write_part(index: _FaissIndex, path: Path) -> None:
    """Write a FAISS index to `path`."""
    # Python writes the file, because FAISS reports no error if the disk is full when it
    # closes a file.
    import faiss

    module: Any = faiss
    with naming(path), open(path, "wb", buffering=0) as file:

        def write(data: bytes) -> None:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]

        module.write_index(index, module.PyCallbackIOWriter(write, _PIECE_BYTES))


def _open_part(root: Path, spec: IndexSpec, file: dict[str, Any]) -> _FaissIndex:
    """Check and load a FAISS file. Python reads the file, so FAISS cannot open
    other files.
    """
    import faiss

    module: Any = faiss
    entry = FileEntry.from_json(file)
    path = root / entry.path
    try:
        with open_index_file(root, path) as opened:
            length = os.fstat(opened.fileno()).st_size
            if length != entry.bytes:
                raise FaissFileError(
                    f"the FAISS file has {length} bytes instead of the {entry.bytes} in"
                    " index.json"
                )
            if (crc := crc32c_stream(opened)) != entry.crc32c:
                raise FaissFileError(
                    "the FAISS file is damaged or was replaced: its CRC-32C is"
                    f" {crc:08x}, but index.json has {entry.crc32c:08x}"
                )
            check_faiss_file(
                opened,
                dimensions=spec.embed_dim,
                vectors=int(file["vectors"]),
                rows=spec.rows,
            )
            opened.seek(0)
            return module.read_index(
                module.PyCallbackIOReader(opened.read, _PIECE_BYTES)
            )
    except (OSError, ValueError, RuntimeError) as error:
        # FAISS raises RuntimeError
        advice = (
            "run 'edje-index verify', or replace the file with 'edje-index ann build'"
        )
        raise cannot_read(path, error, advice) from error


class AnnIndex:
    """Finds the nearest rows of a query embedding. Deleted rows are left out.

    Attributes:
        live: bitmap of the rows that are not deleted, one bit per row, lowest bit
            first; None if no row is deleted.

    Raises:
        UsageError: the index has no nearest-neighbour index.
    """

    def __init__(self, index: CommittedIndex) -> None:
        manifest = index.manifest
        root = index.root
        files = [
            {"vectors": manifest.counts.indexed, **file}
            for file in manifest.ann.get("files", [])
        ]
        if not files:
            raise UsageError(
                f"{root} has no nearest-neighbour index; build it with 'edje-index ann"
                " build'"
            )
        self._embeddings = IndexedEmbeddings(Layout(root), manifest.spec, index=index)
        index.fetch(manifest.ann_files)
        self._parts = [_open_part(root, manifest.spec, file) for file in files]
        self.live: NDArray[np.uint8] | None = None
        if len(index.deleted):
            row_ids = index.deleted.row_ids()
            self.live = np.full(-(-manifest.spec.rows // 8), 0xFF, dtype=np.uint8)
            np.bitwise_and.at(
                self.live, row_ids // 8, ~np.left_shift(1, row_ids % 8).astype(np.uint8)
            )
        probes = manifest.ann.get("probes")
        self._probes = None if probes is None else max(1, int(probes))

    def __len__(self) -> int:
        return sum(int(part.ntotal) for part in self._parts)

    def nearest(
        self,
        query: NDArray[np.float32],
        k: int,
        passing: NDArray[np.bool_] | None = None,
    ) -> Neighbours:
        """Return at most `k` nearest rows for one query [embed_dim], best first.
        See `nearest_to_each`.
        """
        return self.nearest_to_each(query[None], k, passing)[0]

    def nearest_to_each(
        self,
        queries: NDArray[np.float32],
        k: int,
        passing: NDArray[np.bool_] | None = None,
    ) -> list[Neighbours]:
        """Return at most `k` nearest rows for each query, best first.

        Args:
            passing: which rows to search, bool [rows]; deleted rows must be False. The
                search is then exact. None searches all rows that are not deleted.

        Raises:
            ModelError: the queries and the embeddings of the index differ in width.
        """
        width = self._embeddings.spec.embed_dim
        if queries.shape[1] != width:
            raise ModelError(
                f"the query has width {queries.shape[1]}, but the embeddings of the"
                f" index have width {width}; use the model that built the index"
            )
        queries = as_finite(queries, "query")
        probes = self._probes
        live = self.live
        if passing is not None and not all(map(_is_exact, self._parts)):
            # Compare the queries with the stored embeddings, because the FAISS files
            # hold codes.
            row_ids = np.flatnonzero(passing)
            best: list[Neighbours] = [
                (np.empty(0, np.int64), np.empty(0, np.float32)) for _ in queries
            ]
            for start in range(0, len(row_ids), _ROWS_AT_ONCE):
                rows = row_ids[start : start + _ROWS_AT_ONCE]
                vectors = self._embeddings[rows]
                # holes have none
                has_vector = ~np.isnan(vectors[:, 0])
                rows = rows[has_vector]
                similarities = queries @ vectors[has_vector].T
                best = [
                    _best(kept, (rows, its), k)
                    for kept, its in zip(best, similarities, strict=True)
                ]
            return best
        if passing is not None:
            probes = max(map(_lists, self._parts)) or None
            live = np.packbits(passing, bitorder="little")
        return _nearest(
            self._parts, self._embeddings, queries, k, probes=probes, live=live
        )


def _is_exact(part: _FaissIndex) -> bool:
    """Return True if `part` stores exact vectors, so that its scores are exact
    inner products.
    """
    return not hasattr(part, "pq")


def _nearest(
    parts: Sequence[_FaissIndex],
    embeddings: IndexedEmbeddings,
    queries: _Vectors,
    k: int,
    *,
    probes: int | None,
    live: NDArray[np.uint8] | None,
) -> list[Neighbours]:
    """Search FAISS indexes. Return at most `k` nearest rows for each query, best first,
    with exact similarities.

    Args:
        embeddings: stored embeddings, which are compared if a FAISS index stores codes.
        probes: number of inverted lists to search in each FAISS index; None uses the
            number in the FAISS file.
        live: bitmap of the rows to search, one bit per row, lowest bit first; None
            searches all rows.
    """
    import faiss

    module: Any = faiss
    exact = all(map(_is_exact, parts))
    selector = None if live is None else module.IDSelectorBitmap(live)
    scores = [np.empty((len(queries), 0), np.float32)]
    rows = [np.empty((len(queries), 0), np.int64)]
    for part in parts:
        wanted = min(k if exact else k * _CANDIDATES_PER_NEIGHBOUR, int(part.ntotal))
        if not wanted:
            continue
        inner = module.downcast_index(part.index) if hasattr(part, "id_map") else part
        if isinstance(inner, module.IndexIVF):
            lists = min(probes or int(inner.nprobe), int(inner.nlist))
            parameters = module.SearchParametersIVF(nprobe=lists, sel=selector)
        else:
            parameters = module.SearchParameters(sel=selector)
        # FAISS gives a thread at least one query, and idle threads spin, which slows
        # down the work that follows.
        threads = module.omp_get_max_threads()
        module.omp_set_num_threads(min(threads, len(queries)))
        try:
            part_scores, part_rows = part.search(queries, wanted, params=parameters)
        finally:
            module.omp_set_num_threads(threads)
        scores.append(part_scores)
        rows.append(part_rows)
    neighbours = []
    for query, its_scores, its_rows in zip(
        queries, np.concatenate(scores, 1), np.concatenate(rows, 1), strict=True
    ):
        # FAISS returns -1 if the searched lists contain too few vectors
        filled = its_rows >= 0
        candidates = its_rows[filled]
        similarities = its_scores[filled]
        if not exact:
            similarities = embeddings[candidates] @ query
        order = np.argsort(-similarities, kind="stable")[:k]
        neighbours.append((candidates[order], similarities[order]))
    return neighbours


def _best(kept: Neighbours, further: Neighbours, k: int) -> Neighbours:
    """Merge two results of one query, and return the `k` nearest rows, best first."""
    rows = np.concatenate([kept[0], further[0]])
    similarities = np.concatenate([kept[1], further[1]])
    order = np.argsort(-similarities, kind="stable")[:k]
    return rows[order], similarities[order]
