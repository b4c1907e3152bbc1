"""Builds the nearest-neighbour index of the embeddings, and removes rows from it
(SPEC.md section 10). `faiss_index` searches the nearest-neighbour index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edje_index.indexing.faiss_index import (
    CANDIDATES_PER_NEIGHBOUR,
    PIECE_BYTES,
    RECALL_NEIGHBOURS,
    AnnKind,
    FaissIndex,
    Vectors,
    count_lists,
    nearest,
    open_part,
    rows_after_build,
)
from edje_index.progress import OnProgress
from storage_formats.arguments import as_number
from storage_formats.arrays import holes
from storage_formats.atomic import (
    naming,
    private_path,
)
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.checksum import crc32c_file
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import ANN_FILE, IndexSpec
from storage_formats.format.manifest import Ann, CommittedIndex, Manifest
from storage_formats.format.places import Place
from storage_formats.reading.embeddings import IndexedEmbeddings

TARGET_RECALL = 0.95
_RECALL_QUERIES = 200
_LEAST_PROBES = 4
_DEFAULT_PROBES = 32
# number of possible codes of a sub-vector, which has 4 bits
_CODES = 16
# FAISS warns if there are fewer than 39 training vectors per inverted list
# (Clustering::min_points_per_centroid).
_TRAINING_VECTORS_PER_LIST = 64
# If doubling the number of probes raises the recall by less than this number, more
# candidates are tried.
_LEAST_GAIN = 0.01
# tolerance for rounding errors of similarities
_ROUNDING = 1e-6


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
        recall: recall to reach for the 100 nearest rows, 0.01 to 1.
        memory: memory in bytes that the build may use; None for no limit. See
            `AnnKind.choose`.
    """

    ann: str = "auto"
    recall: float = TARGET_RECALL
    memory: int | None = None

    @classmethod
    def like(cls, manifest: Manifest) -> AnnRequest:
        """Return a request for the kind and the recall of an existing index. If its
        kind is the default for the rows that it was built for, the kind is "auto".
        """
        ann = manifest.ann
        spec = manifest.spec
        kind = "Flat" if ann.get("kind") == "flat" else ann.get("factory", "auto")
        built = spec.used_rows - sum(map(len, rows_after_build(manifest)))
        if AnnKind.choose(built, spec.embed_dim).factory == kind:
            kind = "auto"
        return cls(kind, ann.get("recall", {}).get("target", TARGET_RECALL))


def build_ann(
    place: Place,
    spec: IndexSpec,
    *,
    request: AnnRequest = AnnRequest(),
    on_progress: OnProgress | None = None,
) -> Ann:
    """Build the FAISS index of the committed embeddings. Return the description of the
    FAISS index for the manifest.

    The recall is measured by comparison with exact search. The description contains the
    number of inverted lists that a search must read to reach `request.recall`. If there
    are too few vectors to train the requested kind, the FAISS index is flat.

    Raises:
        UsageError: `request` is invalid, or the FAISS index needs more memory than
            `request.memory`.
    """
    recall = as_number(request.recall, "recall", 0.01, 1)
    width = spec.embed_dim
    if request.ann == "auto":
        kind = AnnKind.choose(spec.used_rows, width, request.memory)
    else:
        kind = AnnKind.parse(request.ann, width)
    need = kind.build_bytes(spec.used_rows, width)
    if request.memory is not None and need > request.memory:
        raise UsageError(
            f"the nearest-neighbour index {kind.factory} of {spec.used_rows:,} rows"
            f" needs {need:,} bytes of memory, but only {request.memory:,} are"
            " available; provide more memory, split the index, or name a FAISS factory"
            " with fewer parts",
            parameter="ann",
        )
    embeddings = IndexedEmbeddings(place, spec, list(spec.shard_numbers()))
    index = _trained(kind, embeddings, spec.used_rows)
    _fill(index, embeddings, on_progress)
    measured: dict[str, Any] = {}
    if lists := count_lists(index):
        measured = {
            "factory": kind.factory,
            **_measure(index, lists, embeddings, recall, on_progress),
        }
    else:
        kind = AnnKind()
    file = _write(place, index)
    ann: dict[str, Any] = {
        "kind": kind.name,
        "metric": "inner-product",
        "vectors": int(index.ntotal),
        "files": [file],
        **measured,
    }
    return cast(Ann, ann)


def ann_without_rows(
    place: Place, index: CommittedIndex, row_ids: Sequence[int]
) -> Ann:
    """Remove the rows `row_ids` from all FAISS files. Only files that contain one of
    these rows are written again.

    The centroids do not change.

    Returns:
        The description of all FAISS files for the manifest.
    """
    ann = index.manifest.ann
    index.fetch(index.manifest.ann_files)
    files: list[Any] = []
    for described in ann["files"]:
        file: Any = {"vectors": ann["vectors"], **described}
        part = open_part(index.root, index.manifest.spec, file)
        if part.remove_ids(np.array(row_ids, dtype=np.int64)):
            file = _write(place, part)
        files.append(file)
    return {**ann, "vectors": sum(file["vectors"] for file in files), "files": files}


def _trained(kind: AnnKind, embeddings: IndexedEmbeddings, rows: int) -> FaissIndex:
    """Return an empty FAISS index of `kind` with centroids trained for `rows`
    embeddings. If `kind` has no lists, or if the training sample is too small, the
    FAISS index is flat and has no centroids.

    The sample consists of the `embeddings` whose row id is a multiple of `step`, which
    is even. Rows with odd row ids are therefore never used for training. So they can be
    used to measure the recall.
    """
    import faiss

    width = embeddings.spec.embed_dim
    if kind.lists:
        step = max(2, rows // (kind.lists * _TRAINING_VECTORS_PER_LIST) // 2 * 2)
        sample = np.concatenate(
            [vectors[row_ids % step == 0] for row_ids, vectors in embeddings]
        )
        if len(sample) >= max(kind.lists, _CODES if kind.sub_vectors else 0):
            for centroids in (_on_gpu(faiss.IndexFlatIP(width)), None):
                index: FaissIndex = faiss.index_factory(
                    width, kind.factory, faiss.METRIC_INNER_PRODUCT
                )
                # If `centroids` is not None, it is on the GPU, and the training uses it
                # to find the nearest centroid of each vector.
                index.clustering_index = centroids
                try:
                    index.train(sample)
                except RuntimeError:
                    if centroids is None:
                        raise
                    # the GPU has too little memory: train on the CPU
                    continue
                # FAISS does not keep the Python object alive, so the pointer to it must
                # go
                index.clustering_index = None
                index.nprobe = min(_DEFAULT_PROBES, kind.lists)
                return index
    return faiss.IndexIDMap2(faiss.IndexFlatIP(width))


def _fill(
    index: FaissIndex,
    embeddings: IndexedEmbeddings,
    on_progress: OnProgress | None = None,
) -> None:
    """Add `embeddings` to the empty `index`, shard by shard. The FAISS ids are the
    row ids.
    """

    def add_all() -> None:
        for done, (row_ids, vectors) in enumerate(embeddings, 1):
            index.add_with_ids(vectors, row_ids)
            if on_progress:
                on_progress("adding embeddings", done, len(embeddings.shards))

    # The quantizer finds the inverted list of each vector, which is faster on a GPU.
    own = index.quantizer if count_lists(index) else None
    copy = None if own is None else _on_gpu(own)
    if copy is not None:
        index.quantizer = copy
        try:
            return add_all()
        except RuntimeError:
            # the GPU has too little memory: begin again on the CPU
            index.reset()
        finally:
            index.quantizer = own
    add_all()


def _on_gpu(flat: FaissIndex) -> FaissIndex | None:
    """Return a copy of a flat FAISS index on the first GPU. Return None if FAISS can
    use no GPU.

    The GPU trains the centroids and finds the inverted list of each vector. Codes,
    their lists and searches stay on the CPU, because FAISS has neither 4-bit fast-scan
    codes nor filters of rows on GPUs.
    """
    import faiss

    module: Any = faiss
    # builds of FAISS for CPUs report no GPU
    if not module.get_num_gpus():
        return None
    # the call fails if other processes have taken the memory of the GPU
    with contextlib.suppress(RuntimeError):
        # only one GPU, because other processes may need the others
        return module.index_cpu_to_all_gpus(flat, ngpu=1)
    return None


def _measure(
    index: FaissIndex,
    lists: int,
    embeddings: IndexedEmbeddings,
    target: float,
    on_progress: OnProgress | None,
) -> dict[str, Any]:
    """Measure the recall of `index` with increasing numbers of probes and candidates,
    until the recall reaches `target` or no larger number is left.

    A row in the results of `index` counts as a neighbour if its similarity is at least
    that of the 100th neighbour by exact search. So it does not matter which of several
    rows with equal embeddings are in the results.

    Return the keys `probes`, `candidates` and `recall` of `ann` in `index.json`; empty
    if the sample of queries is empty.
    """
    row_ids, queries, neighbours = recall_queries(embeddings, on_progress)
    if not len(row_ids):
        return {}
    levels = list(CANDIDATES_PER_NEIGHBOUR if hasattr(index, "pq") else (2,))
    probes = min(_LEAST_PROBES, lists)
    before = 0.0
    while True:
        results = nearest(
            [index],
            embeddings,
            queries,
            RECALL_NEIGHBOURS + 1,
            probes=probes,
            live=None,
            candidates=levels[0],
        )
        shares = []
        for row_id, (rows, similarities), exact in zip(
            row_ids, results, neighbours, strict=True
        ):
            exact = exact[np.isfinite(exact)]
            least = exact.min() - _ROUNDING
            # One row of both results is the query itself, which does not count. A
            # single row has no neighbours that a search could miss.
            others = np.count_nonzero(similarities[rows != row_id] >= least)
            shares.append(min(1.0, others / (len(exact) - 1)) if len(exact) > 1 else 1)
        recall = float(np.mean(shares))
        if recall >= target or (probes >= lists and len(levels) == 1):
            break
        if probes < lists and (recall > before + _LEAST_GAIN or len(levels) == 1):
            probes = min(2 * probes, lists)
            before = recall
        else:
            # More lists do not help, because the codes rank some neighbours too low.
            # With more candidates, few lists may be enough.
            levels.pop(0)
            probes = min(_LEAST_PROBES, lists)
            before = 0.0
    measured = {
        "k": RECALL_NEIGHBOURS,
        "queries": len(row_ids),
        "value": round(recall, 4),
        "target": target,
    }
    settings: dict[str, Any] = {"probes": probes, "recall": measured}
    if levels[0] > CANDIDATES_PER_NEIGHBOUR[0]:
        settings["candidates"] = levels[0]
    return settings


def recall_queries(
    embeddings: IndexedEmbeddings, on_progress: OnProgress | None = None
) -> tuple[NDArray[np.int64], Vectors, Vectors]:
    """Draw rows as queries, evenly from all shards, and find the similarities of the
    101 nearest rows of each query by exact search. One of them is the query itself.

    The row ids are odd, because rows with even row ids are used to train FAISS. The
    last row id of a segment is an exception: it may be even, and its row may have been
    used for training.

    Return the row ids and the embeddings of the queries, and the similarities of each
    query, in any order.
    """
    spec = embeddings.spec
    rng = np.random.default_rng(0)
    drawn = set[int]()
    for at in np.linspace(0, len(embeddings.shards) - 1, _RECALL_QUERIES):
        rows = spec.shard_rows(embeddings.shards[int(at)])
        drawn.add(min(int(rng.integers(rows.start, rows.stop)) | 1, rows.stop - 1))
    row_ids = np.array(sorted(drawn), dtype=np.int64)
    queries = embeddings[row_ids]
    is_indexed = ~holes(queries)
    row_ids = row_ids[is_indexed]
    queries = queries[is_indexed]
    count = RECALL_NEIGHBOURS + 1
    # if there are fewer than 101 rows, the lowest similarities stay -inf
    best = np.full((len(queries), count), -np.inf, np.float32)
    for done, (_, vectors) in enumerate(embeddings, 1):
        if on_progress:
            on_progress("measuring the recall", done, len(embeddings.shards))
        similarities = np.concatenate([best, queries @ vectors.T], axis=1)
        best = np.partition(similarities, -count, axis=1)[:, -count:]
    return row_ids, queries, best


def _write(place: Place, index: FaissIndex) -> dict[str, Any]:
    """Write a FAISS index to a file that is named after its checksum, and return the
    entry of the file for the manifest.
    """
    temporary = private_path(place.ann / "index.faiss", place.staging)
    try:
        write_part(index, temporary)
        length, crc = crc32c_file(temporary)
        file = FileEntry(ANN_FILE.format(crc), length, crc)
        place.put([(temporary, file)])
    finally:
        temporary.unlink(missing_ok=True)
    return {**file.to_json(), "vectors": int(index.ntotal)}


def write_part(index: FaissIndex, path: Path) -> None:
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

        module.write_index(index, module.PyCallbackIOWriter(write, PIECE_BYTES))
