"""The systems that are compared. Each has the settings that its documentation recommends for late interaction.

`python -m benchmarks.end_to_end.systems build NAME FOLDER` and `... search NAME FOLDER EFFORT K` run one step of one
system in a process of its own, and print its result as JSON.
"""

from __future__ import annotations

import json
import math
import sys
import time
from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.end_to_end.collection import Collection, VectorQuery
from edje_index.indexing.faiss_index import add_ann
from edje_index.search.late_interaction_search import LateInteractionSearch, max_sim
from edje_index.search.token_index import TokenIndex
from storage_formats.writing.index_writer import IndexWriter


class System(ABC):
    """A search system.

    Attributes:
        settings: description of the settings, for the report.
        package: module that the system needs; None for a module of this project.
        effort: name of the parameter that trades recall for time.
        efforts: values of that parameter to measure.
    """

    settings: ClassVar[str]
    package: ClassVar[str | None] = None
    effort: ClassVar[str] = "pool"
    efforts: ClassVar[tuple[int, ...]] = (20, 100, 400)

    def __init__(self, folder: Path, collection: Collection) -> None:
        self.folder = folder
        self.collection = collection

    @abstractmethod
    def build(self) -> None:
        """Write the files that `search` of this retrieval system reads."""

    @abstractmethod
    def open(self) -> None:
        """Open the files."""

    @abstractmethod
    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        """Return the positions of the `k` best images, best first."""


class EdjeIndex(System):
    """`LateInteractionSearch` over one precision."""

    precision: ClassVar[str] = "bf16"
    settings = "exact FAISS search chooses the pool, tokens in bf16"

    def build(self) -> None:
        _, m, d = self.collection.tokens.shape
        with IndexWriter.create(
            self.folder / "index",
            block_shape=(m, d),
            embed_dim=self.collection.embeddings.shape[1],
            precisions=[self.precision],
        ) as writer:
            for positions, tokens in self.collection.chunks():
                writer.append(tokens, self.collection.embeddings[positions])
        add_ann(self.folder / "index")

    def open(self) -> None:
        self._index = LateInteractionSearch.open(self.folder / "index")

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        hits = self._index.search(query.words, k, embedding=query.embedding, pool=effort)
        return [hit.row_id for hit in hits]


class EdjeIndexNvfp4(EdjeIndex):
    """`LateInteractionSearch` over 4-bit tokens."""

    precision = "nvfp4"
    settings = "exact FAISS search chooses the pool, tokens in nvfp4"


class MappedTokens(System):
    """FAISS chooses the pool, and the tokens are read from a memory-mapped file, as in the EDJE paper."""

    settings = "exact FAISS search chooses the pool, bfloat16 tokens in np.memmap, MaxSim in NumPy"
    package = "faiss"

    def build(self) -> None:
        faiss: Any = import_module("faiss")
        flat = faiss.IndexFlatIP(self.collection.embeddings.shape[1])
        flat.add(self.collection.embeddings)
        faiss.write_index(flat, str(self.folder / "embeddings.faiss"))
        self.collection.tokens.view(np.uint16).tofile(self.folder / "tokens.bf16")

    def open(self) -> None:
        faiss: Any = import_module("faiss")
        self._flat = faiss.read_index(str(self.folder / "embeddings.faiss"))
        shape, dtype = self.collection.tokens.shape, self.collection.tokens.dtype
        self._tokens = np.memmap(self.folder / "tokens.bf16", dtype=np.uint16, mode="r", shape=shape).view(dtype)

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        candidates = self._flat.search(query.embedding[None], min(effort, len(self._tokens)))[1][0]
        scores = max_sim(query.words, self._tokens[candidates])
        return [int(position) for position in candidates[np.argsort(-scores, kind="stable")[:k]]]


class LanceMultivector(System):
    """A multivector column of Lance with a vector index over all tokens. It reads no embeddings."""

    settings = "IVF_PQ over all tokens, cosine, sqrt(tokens) partitions, d / 8 sub-vectors, float16, refine_factor 10"
    package = "lance"
    effort = "nprobes"
    efforts = (4, 16, 64)

    def build(self) -> None:
        lance, pa = import_module("lance"), import_module("pyarrow")
        count, m, d = self.collection.tokens.shape
        kind = pa.list_(pa.list_(pa.float16(), d))
        schema = pa.schema([pa.field("position", pa.int64()), pa.field("tokens", kind)])

        def batches() -> Any:
            for positions, tokens in self.collection.chunks():
                vectors = pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1).astype(np.float16)), d)
                starts = pa.array(np.arange(0, len(tokens) * m + 1, m, dtype=np.int32))
                numbers = pa.array(np.arange(len(tokens)) + positions.start)
                yield pa.record_batch([numbers, pa.ListArray.from_arrays(starts, vectors)], schema=schema)

        reader = pa.RecordBatchReader.from_batches(schema, batches())
        dataset = lance.write_dataset(reader, str(self.folder / "tokens.lance"))
        partitions = max(1, math.isqrt(count * m))
        dataset.create_index(
            "tokens", "IVF_PQ", metric="cosine", num_partitions=partitions, num_sub_vectors=max(1, d // 8)
        )

    def open(self) -> None:
        self._dataset = import_module("lance").dataset(str(self.folder / "tokens.lance"))

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        words = query.words.astype(np.float16)
        nearest = {"column": "tokens", "q": words, "k": k, "nprobes": effort, "refine_factor": 10}
        table = self._dataset.to_table(columns=["position", "_distance"], nearest=nearest)
        positions: list[int] = table["position"].to_pylist()
        return positions


class QdrantEdge(System):
    """Qdrant in this process: the embeddings choose the pool, and MaxSim of the tokens sorts it."""

    settings = "HNSW over embeddings (m 16, ef_construct 100), float16 multivectors on disk without HNSW"
    package = "qdrant_edge"

    def build(self) -> None:
        qdrant: Any = import_module("qdrant_edge")
        (self.folder / "shard").mkdir()
        shard = qdrant.EdgeShard.create(str(self.folder / "shard"), self._config(qdrant))
        for positions, tokens in self.collection.chunks():
            vectors = zip(self.collection.embeddings[positions].tolist(), tokens.tolist(), strict=True)
            points = [
                qdrant.Point(number, {"embedding": embedding, "tokens": block}, {})
                for number, (embedding, block) in enumerate(vectors, positions.start)
            ]
            shard.update(qdrant.UpdateOperation.upsert_points(points))
        shard.optimize()
        shard.flush()
        shard.close()

    def _config(self, qdrant: Any) -> Any:
        d, embed_dim = self.collection.tokens.shape[2], self.collection.embeddings.shape[1]
        tokens = qdrant.EdgeVectorParams(
            size=d,
            distance=qdrant.Distance.Dot,
            multivector_config=qdrant.MultiVectorConfig(qdrant.MultiVectorComparator.MaxSim),
            datatype=qdrant.VectorStorageDatatype.Float16,
            memory=qdrant.Memory.Cold,
            hnsw_config=qdrant.HnswIndexConfig(m=0, ef_construct=100, full_scan_threshold=10_000),
        )
        embedding = qdrant.EdgeVectorParams(
            size=embed_dim,
            distance=qdrant.Distance.Dot,
            hnsw_config=qdrant.HnswIndexConfig(m=16, ef_construct=100, full_scan_threshold=10_000),
        )
        return qdrant.EdgeConfig(vectors={"embedding": embedding, "tokens": tokens})

    def open(self) -> None:
        self._qdrant: Any = import_module("qdrant_edge")
        self._shard = self._qdrant.EdgeShard.load(str(self.folder / "shard"))

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        qdrant = self._qdrant
        by_embedding = qdrant.Query.Nearest(query.embedding.tolist(), using="embedding")
        by_tokens = qdrant.Query.Nearest(query.words.tolist(), using="tokens")
        prefetch = qdrant.Prefetch(limit=effort, query=by_embedding)
        request = qdrant.QueryRequest(limit=k, prefetches=[prefetch], query=by_tokens)
        return [int(point.id) for point in self._shard.query(request)]


class FinalScoreSearch(System):
    """`TokenIndex.search` over the index that the vectors come from, with the text tower and the joint encoder."""

    settings = "the whole search from the text, pool 100, the score of the bundle"
    effort = "joint_pool"
    efforts = (10, 20, 100)

    def __init__(self, folder: Path, collection: Collection) -> None:
        super().__init__(folder, collection)
        self._source = folder / "source"
        self._positions = {int(row): position for position, row in enumerate(collection.row_ids)}

    def build(self) -> None:
        """Write nothing. `source` and `model` are links to the index and its bundle."""

    def open(self) -> None:
        self._index = TokenIndex.open(self._source.resolve(), (self.folder / "model").resolve())

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        hits = self._index.search(query.text, k, max(k, 100), joint_pool=effort)
        return [self._positions[hit.row_id] for hit in hits]


SYSTEMS: dict[str, type[System]] = {
    "edje-index bf16": EdjeIndex,
    "edje-index nvfp4": EdjeIndexNvfp4,
    "FAISS and np.memmap": MappedTokens,
    "Lance multivector": LanceMultivector,
    "Qdrant Edge": QdrantEdge,
    "edje-index, joint encoder": FinalScoreSearch,
}
"""The systems by name."""

_WARM_UP = 3  # searches before the timed ones


def main(step: str, name: str, folder: str, *numbers: str) -> dict[str, Any]:
    """Build a system, or search for every query. Return the result, its duration, and the peak memory in bytes."""
    system_class = SYSTEMS[name]
    import_module(system_class.package or "faiss")  # so that its memory does not count as memory of the search
    libraries_bytes, started = _peak_bytes(), time.monotonic()
    system = system_class(Path(folder) / name.replace(" ", "-"), Collection.open(Path(folder)))
    result: dict[str, Any] = {}
    if step == "build":
        system.build()
        files = [path for path in system.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        result["bytes"] = sum(path.stat().st_size for path in files)
    else:
        effort, k = map(int, numbers)
        system.open()
        queries, positions, milliseconds = system.collection.queries, [], []
        for query in queries[:_WARM_UP]:
            system.search(query, k, effort)
        for query in queries:
            before = time.perf_counter()
            positions.append(system.search(query, k, effort))
            milliseconds.append(1e3 * (time.perf_counter() - before))
        result |= {"positions": positions, "milliseconds": milliseconds}
    used = {"libraries_bytes": libraries_bytes, "peak_bytes": _peak_bytes()}
    return {**result, "seconds": time.monotonic() - started, **used}


def _peak_bytes() -> int:
    """Return the peak resident memory of this process. `getrusage` would include that of the parent before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
