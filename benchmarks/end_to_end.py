"""Compares whole search systems on the same embeddings, tokens and queries: recall,
latency, memory and disk space.

A model bundle computes the vectors for late interaction. It subtracts the mean word
vector from the image tokens and from the word vectors, and scales all vectors to unit
length. The exact score of an image is the MaxSim between the tokens of the image and
the content words of the caption.

Each step of a system runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from benchmarks.disk import evict, peak_memory
from benchmarks.process import call_in_process
from benchmarks.report import Say, machine, table
from edje_index.captions.matching import NAME_COLUMNS, match_items
from edje_index.captions.reading import read_captions
from edje_index.indexing.faiss_index import AnnIndex
from edje_index.models.joint_scorer import JointScorer
from edje_index.scoring.parts import content_token_mask
from edje_index.search.late_interaction_search import LateInteractionSearch, max_sim
from edje_index.search.token_index import TokenIndex
from pipelines.environment import environment
from pipelines.jobs.ann import add_ann
from storage_formats.codecs import Blocks
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import read_all_rows
from storage_formats.format.tombstones import live_rows
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.threads import default_threads
from storage_formats.writing.index_writer import IndexWriter

CUTOFFS = (1, 5, 10)
_CHUNK = 256
# searches before the timed ones
_WARM_UP = 3
# seconds for the start and the end of a process
_SPARE = 10
# length of the noise of repeated vectors, which have length 1
_TOKEN_NOISE = 0.3
_EMBEDDING_NOISE = 0.3
Floats = NDArray[np.float32]


def bench_end_to_end(
    index: Path,
    captions: Path,
    folder: Path,
    say: Say,
    *,
    images: Path | None = None,
    model: Path | None = None,
    systems: Sequence[str] = (),
    queries: int = 200,
    rows: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Build every system from the same vectors, search with each, and return the
    report. Linux only.

    The other arguments are arguments and options of `edje-index bench end-to-end`.
    `folder` is removed at the end, and `say` receives one line of text per system and
    run.

    Raises:
        UsageError: the folder is not empty, a system is unknown, or no caption can be
            searched for.
    """
    names = systems or tuple(SYSTEMS)
    unknown = sorted(set(names) - set(SYSTEMS))
    if unknown:
        raise UsageError(
            f"there is no system {unknown[0]!r}; choose from: {', '.join(SYSTEMS)}",
            parameter="systems",
        )
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} exists and is not empty; choose a new folder", parameter="folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Lance takes a URL
    folder = folder.resolve()
    try:
        opened = TokenIndex.open(index, model)
        items = read_captions(captions, images)
        items, row_of_item = match_items(
            opened.committed.root, read_all_rows(opened.committed, NAME_COLUMNS), items
        ).indexed(items)
        every = [
            (text, int(row))
            for item, row in zip(items, row_of_item, strict=True)
            for text in item.captions
        ]
        sample = np.random.default_rng(0).permutation(len(every))[:queries]
        write_collection(folder, opened, [every[position] for position in sample], rows)
        collection = Collection.open(folder)
        exact = collection.exact(max(CUTOFFS))
        memory = None if rows is None else collection.tokens.nbytes // 4
        results = []
        for number, name in enumerate(names):
            say(f"measuring {name}, {number + 1} of {len(names)}")
            system = SYSTEMS[name]
            result: dict[str, Any] = {
                "name": name,
                "settings": system.settings,
                "effort": system.effort,
                "runs": [],
            }
            results.append(result)
            files = _files(folder, name)
            ends = time.monotonic() + (limit or math.inf)
            files.mkdir()
            try:
                if rows is not None and system.needs_images:
                    raise EdjeError("not measured: the repeated rows have no images")
                built = call_in_process(
                    "benchmarks.end_to_end:build_system",
                    name,
                    str(folder),
                    timeout=limit,
                )
                stored = built["bytes"] or _bytes_in(opened.committed.root)
                result["build_seconds"] = built["seconds"]
                result["bytes_per_image"] = stored / len(collection.tokens)
                for effort in system.efforts:
                    left = max(1.0, ends - time.monotonic()) if limit else None
                    arguments = (
                        name,
                        str(folder),
                        effort,
                        max(CUTOFFS),
                        memory,
                        left and left - _SPARE,
                    )
                    searched = call_in_process(
                        "benchmarks.end_to_end:search_system", *arguments, timeout=left
                    )
                    run = {"effort": effort, **figures(searched, collection, exact)}
                    result["runs"].append(run)
                    say(
                        f"  {system.effort} {effort}: {run['of_exact']:.1f} % of the"
                        f" exact ten, {run['p95_ms']:.1f} ms"
                    )
            except EdjeError as error:
                result["problem"] = str(error)
                say(f"  {error}")
            shutil.rmtree(files)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    count, m, d = collection.tokens.shape
    return {
        "environment": environment(),
        "settings": {
            **{
                "index": index.name,
                "captions": captions.name,
                "queries": queries,
                "rows": rows,
            },
            **{"memory_bytes": memory, "limit_seconds": limit},
        },
        "collection": {
            "images": count,
            "block_shape": [m, d],
            "queries": len(collection.queries),
        },
        "systems": results,
    }


def figures(
    searched: dict[str, Any], collection: Collection, exact: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the recall in percent, the latency, and the memory of one run.

    `searched` is the result of `search_system`. `exact` has the positions of the exact
    best images for each query.
    """
    # of fewer queries if the time was up
    answers = searched["positions"]
    hits = [
        [position == query.relevant for position in positions]
        for query, positions in zip(collection.queries, answers, strict=False)
    ]
    shared = [
        len(set(found) & set(best)) / len(best)
        for found, best in zip(answers, exact, strict=False)
    ]
    p50, p95 = np.percentile(searched["milliseconds"], [50, 95])
    cold_p50, cold_p95 = np.percentile(searched["cold_milliseconds"], [50, 95])
    return {
        "recall": {
            str(k): 100 * float(np.mean([any(row[:k]) for row in hits]))
            for k in CUTOFFS
        },
        "of_exact": 100 * float(np.mean(shared)),
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "cold_p50_ms": float(cold_p50),
        "cold_p95_ms": float(cold_p95),
        "queries": len(answers),
        "memory_bytes": searched["peak_bytes"],
        "libraries_bytes": searched["libraries_bytes"],
        "is_capped": searched["is_capped"],
    }


_METHOD = """Every system gets the same embeddings, tokens and queries. Each run is a
process of its own that searches for one caption after the other. The files of the
system are first evicted from the page cache. After three searches to warm up the code,
all captions are searched for twice. The first pass is cold, although later captions
find blocks in the page cache that earlier captions needed. The second pass is warm.

- R@k: percentage of the captions whose photo is among the first k hits.
- Of exact ten: percentage of the ten photos with the highest MaxSim that the system
  finds. The joint encoder sorts by another score, so it may find fewer of these photos.
- Memory: peak resident memory, including mapped files. The number in brackets is the
  memory of the imported libraries.
- Bytes per photo: all files of the system. Rows with the joint encoder count the index
  with all its precisions.
- Only rows with the joint encoder include the time of the text tower."""
_COLUMNS = (
    *(
        "R@1",
        "R@5",
        "R@10",
        "of exact ten",
        "p50 ms",
        "p95 ms",
        "cold p50",
        "cold p95",
        "memory MiB",
    ),
    *("bytes per photo", "build s"),
)


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report in Markdown."""
    collection = report["collection"]
    m, d = collection["block_shape"]
    yield f"# Whole systems, {report['environment']['date']}\n"
    yield machine(report["environment"])
    yield (
        f"{collection['images']:,} photos of {m} x {d} tokens,"
        f" {collection['queries']:,} captions.\n"
    )
    if limit := report["settings"]["limit_seconds"]:
        yield f"Each system had {limit:,} seconds for building and all searches.\n"
    if memory := report["settings"]["memory_bytes"]:
        capped = all(
            run["is_capped"] for system in report["systems"] for run in system["runs"]
        )
        yield (
            f"Searches had {memory / 2**20:,.0f} MiB of memory with page cache,"
            f" {'' if capped else 'NOT '}enforced.\n"
        )
    rows = []
    queries = collection["queries"]
    for system in report["systems"]:
        if "problem" in system:
            rows.append(
                (system["name"], f"stopped: {system['problem']}", *[""] * len(_COLUMNS))
            )
        for run in system["runs"]:
            rows.append(
                (
                    system["name"],
                    f"{system['effort']} {run['effort']}"
                    + f", {run['queries']} captions" * (run["queries"] < queries),
                    *(f"{value:.1f}" for value in run["recall"].values()),
                    *(
                        f"{run[key]:.1f}"
                        for key in (
                            "of_exact",
                            "p50_ms",
                            "p95_ms",
                            "cold_p50_ms",
                            "cold_p95_ms",
                        )
                    ),
                    (
                        f"{run['memory_bytes'] / 2**20:.0f}"
                        f" ({run['libraries_bytes'] / 2**20:.0f})"
                    ),
                    f"{system.get('bytes_per_image', 0):,.0f}",
                    f"{system.get('build_seconds', 0):.1f}",
                )
            )
    yield from table(("system", "setting", *_COLUMNS), rows)
    yield "\n## Settings\n"
    yield from (
        f"- {system['name']}: {system['settings']}." for system in report["systems"]
    )
    yield f"\n## Method\n\n{_METHOD}"


class VectorQuery(NamedTuple):
    """A query as every system gets it.

    Attributes:
        embedding: embedding of the caption, float32 [e].
        words: vectors of the content words of the caption, float32 [w, d].
        relevant: position of the caption's image in the collection.
    """

    text: str
    embedding: Floats
    words: Floats
    relevant: int


@dataclass(frozen=True)
class Collection:
    """The vectors of n images.

    Attributes:
        tokens: tokens of each image, bfloat16 [n, m, d], mapped into memory.
        embeddings: embedding of each image, float32 [n, e].
        row_ids: row id of each image in the index that the vectors come from, int64
            [n].
    """

    tokens: Blocks
    embeddings: Floats
    row_ids: NDArray[np.int64]
    queries: list[VectorQuery]
    index: Path
    model: Path

    @classmethod
    def open(cls, folder: Path) -> Collection:
        """Open a collection that `write_collection` wrote."""
        tokens = np.load(folder / "tokens.npy", mmap_mode="r").view(ml_dtypes.bfloat16)
        return cls(tokens, *pickle.loads((folder / "vectors.pickle").read_bytes()))

    def chunks(self) -> Iterator[tuple[slice, Floats]]:
        """Yield (positions, float32 tokens) of a few images at a time."""
        for start in range(0, len(self.tokens), _CHUNK):
            positions = slice(start, start + _CHUNK)
            yield positions, self.tokens[positions].astype(np.float32)

    def exact(self, k: int) -> list[list[int]]:
        """Return the positions of the `k` images with the highest MaxSim for each
        query, best first.
        """
        scores = np.empty((len(self.queries), len(self.tokens)), dtype=np.float32)
        words = np.concatenate([query.words for query in self.queries]).T
        starts = np.cumsum([0, *(len(query.words) for query in self.queries[:-1])])
        for positions, tokens in self.chunks():
            scores[:, positions] = np.add.reduceat(
                (tokens @ words).max(axis=1), starts, axis=1
            ).T
        best: list[list[int]] = np.argsort(-scores, axis=1, kind="stable")[
            :, :k
        ].tolist()
        return best


def write_collection(
    folder: Path,
    index: TokenIndex,
    queries: Sequence[tuple[str, int]],
    rows: int | None = None,
) -> None:
    """Write the vectors of every image in `index`, and of `queries`, which are pairs of
    a caption and a row id.

    Queries without a content word are left out. With `rows`, images are repeated with
    noise up to this number.

    Raises:
        UsageError: no query has a content word.
    """
    row_ids = live_rows(index.committed)
    embeddings = read_embeddings(index.committed, row_ids)
    present = ~np.isnan(embeddings).any(axis=1)
    row_ids = row_ids[present]
    embeddings = embeddings[present]
    joint = index.model.joint
    distinct = len(row_ids)
    shape = (rows or distinct, *index.manifest.spec.block_shape)
    row_ids = np.resize(row_ids, shape[0])
    embeddings = np.resize(embeddings, (shape[0], embeddings.shape[1]))
    bits = np.lib.format.open_memmap(
        folder / "tokens.npy", mode="w+", dtype=np.uint16, shape=shape
    )
    noise = torch.Generator().manual_seed(0)
    for start in range(0, len(row_ids), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        blocks = torch.from_numpy(
            _unit(
                torch.from_numpy(index.store.fetch(row_ids[chunk]).astype(np.float32)),
                joint,
            )
        )
        vectors = torch.from_numpy(embeddings[chunk])
        is_repeated = torch.arange(start, start + len(blocks)) >= distinct
        for values, length in ((blocks, _TOKEN_NOISE), (vectors, _EMBEDDING_NOISE)):
            values[is_repeated] += torch.randn(
                values[is_repeated].shape, generator=noise
            ) * (length / math.sqrt(values.shape[-1]))
            values /= values.norm(dim=-1, keepdim=True)
        bits[chunk] = blocks.numpy().astype(ml_dtypes.bfloat16).view(np.uint16)
        embeddings[chunk] = vectors.numpy()
    bits.flush()
    positions = {int(row): position for position, row in enumerate(row_ids[:distinct])}
    content = content_token_mask(joint.tokenizer)
    kept: list[VectorQuery] = []
    texts = [text for text, _ in queries]
    columns = (
        queries,
        joint.tokenizer.caption_ids(texts),
        index.model.text.encode(texts),
    )
    for (text, row_id), ids, embedding in zip(*columns, strict=True):
        content_ids = [token_id for token_id in ids if content[token_id]]
        if content_ids and row_id in positions:
            words = _unit(joint.word_vectors[content_ids], joint)
            kept.append(VectorQuery(text, embedding, words, positions[row_id]))
    if not kept:
        raise UsageError("no query has a content word; give other captions")
    origin = (index.committed.root, index.model.info.path.resolve())
    (folder / "vectors.pickle").write_bytes(
        pickle.dumps((embeddings, row_ids, kept, *origin))
    )


def _unit(vectors: torch.Tensor, joint: JointScorer) -> Floats:
    unit: Floats = functional.normalize(
        vectors.cpu() - joint.mean_word_vector.cpu(), dim=-1
    ).numpy()
    return unit


class System(ABC):
    """A search system, with the settings that its documentation recommends for late
    interaction.

    Attributes:
        effort: name of the parameter that trades recall for time.
        efforts: values of that parameter to measure.
        needs_images: whether every row must be an image of the index.
    """

    settings: ClassVar[str]
    package: ClassVar[str] = "faiss"
    needs_images: ClassVar[bool] = False
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
        hits = self._index.search(
            query.words, k, embedding=query.embedding, pool=effort
        )
        return [hit.row_id for hit in hits]


def _of_precision(base: type[System], precision: str, settings: str) -> type[System]:
    return type(
        f"{base.__name__} {precision}",
        (base,),
        {"precision": precision, "settings": settings},
    )


class MappedTokens(System):
    """FAISS chooses the pool, and the tokens are read from a memory-mapped file, as
    in the EDJE paper.
    """

    settings = (
        "exact FAISS search chooses the pool, bfloat16 tokens in np.memmap, MaxSim in"
        " NumPy"
    )

    def build(self) -> None:
        faiss: Any = import_module("faiss")
        flat = faiss.IndexFlatIP(self.collection.embeddings.shape[1])
        flat.add(self.collection.embeddings)
        faiss.write_index(flat, str(self.folder / "embeddings.faiss"))
        self.collection.tokens.view(np.uint16).tofile(self.folder / "tokens.bf16")

    def open(self) -> None:
        faiss: Any = import_module("faiss")
        self._flat = faiss.read_index(str(self.folder / "embeddings.faiss"))
        shape = self.collection.tokens.shape
        dtype = self.collection.tokens.dtype
        self._tokens = np.memmap(
            self.folder / "tokens.bf16", dtype=np.uint16, mode="r", shape=shape
        ).view(dtype)

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        candidates = self._flat.search(
            query.embedding[None], min(effort, len(self._tokens))
        )[1][0]
        scores = max_sim(query.words, self._tokens[candidates])
        return [
            int(position)
            for position in candidates[np.argsort(-scores, kind="stable")[:k]]
        ]


class TensorStoreTokens(EdjeIndex):
    """FAISS chooses the pool, and TensorStore reads the token array of an index of
    this package.
    """

    settings = (
        "exact FAISS search chooses the pool, TensorStore reads the tokens without a"
        " cache, MaxSim in NumPy"
    )
    package = "tensorstore"

    def open(self) -> None:
        index = CommittedIndex.open(self.folder / "index")
        ts = import_module("tensorstore")
        limits = {
            "file_io_concurrency": {"limit": 128},
            "data_copy_concurrency": {"limit": default_threads()},
        }
        path = str(Layout(index.root).token_array(self.precision))
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        context = ts.Context({**limits, "cache_pool": {"total_bytes_limit": 0}})
        checks = {"recheck_cached_metadata": False, "recheck_cached_data": False}
        self._array = ts.open(spec, read=True, context=context, **checks).result()
        self._ann = AnnIndex(index)

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        candidates = self._ann.nearest(query.embedding, effort)[0]
        blocks = np.ascontiguousarray(self._array[candidates].read().result()).view(
            ml_dtypes.bfloat16
        )
        scores = max_sim(
            query.words,
            blocks.reshape(len(candidates), *self.collection.tokens.shape[1:]),
        )
        return [
            int(position)
            for position in candidates[np.argsort(-scores, kind="stable")[:k]]
        ]


class LanceMultivector(System):
    """A multivector column of Lance with a vector index over all tokens. It reads
    no embeddings.
    """

    settings = (
        "IVF_PQ over all tokens, cosine, sqrt(tokens) partitions, d / 8 sub-vectors,"
        " float16, refine_factor 10"
    )
    package = "lance"
    effort = "nprobes"
    efforts: ClassVar[tuple[int, ...]] = (4, 16, 64)

    def build(self) -> None:
        lance = import_module("lance")
        pa = import_module("pyarrow")
        count, m, d = self.collection.tokens.shape
        kind = pa.list_(pa.list_(pa.float16(), d))
        schema = pa.schema([pa.field("position", pa.int64()), pa.field("tokens", kind)])

        def batches() -> Any:
            for positions, tokens in self.collection.chunks():
                vectors = pa.FixedSizeListArray.from_arrays(
                    pa.array(tokens.reshape(-1).astype(np.float16)), d
                )
                starts = pa.array(np.arange(0, len(tokens) * m + 1, m, dtype=np.int32))
                numbers = pa.array(np.arange(len(tokens)) + positions.start)
                yield pa.record_batch(
                    [numbers, pa.ListArray.from_arrays(starts, vectors)], schema=schema
                )

        reader = pa.RecordBatchReader.from_batches(schema, batches())
        dataset = lance.write_dataset(reader, str(self.folder / "tokens.lance"))
        if self.effort == "nprobes":
            partitions = max(1, math.isqrt(count * m))
            dataset.create_index(
                "tokens",
                "IVF_PQ",
                metric="cosine",
                num_partitions=partitions,
                num_sub_vectors=max(1, d // 8),
            )

    def open(self) -> None:
        self._dataset = import_module("lance").dataset(
            f"file+uring://{self.folder / 'tokens.lance'}"
        )

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        words = query.words.astype(np.float16)
        nearest = {
            "column": "tokens",
            "q": words,
            "k": k,
            "nprobes": effort,
            "refine_factor": 10,
        }
        table = self._dataset.to_table(
            columns=["position", "_distance"], nearest=nearest
        )
        positions: list[int] = table["position"].to_pylist()
        return positions


class LanceExact(LanceMultivector):
    """A multivector column of Lance without an index. A search reads all tokens."""

    settings = "no vector index, cosine, float16"
    effort = "refine"
    efforts: ClassVar[tuple[int, ...]] = (1,)

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        nearest = {
            "column": "tokens",
            "q": query.words.astype(np.float16),
            "k": k,
            "metric": "cosine",
        }
        table = self._dataset.to_table(
            columns=["position", "_distance"], nearest={**nearest, "use_index": False}
        )
        positions: list[int] = table["position"].to_pylist()
        return positions


class FastPlaid(System):
    """PLAID: centroids choose the candidates, and tokens of 4 bits per value sort
    them. It reads no embeddings.
    """

    settings = "4 bits, n_full_scores 4096 (the default)"
    package = "fast_plaid"
    effort = "n_ivf_probe"
    efforts = (4, 8, 32)

    def build(self) -> None:
        tokens = (
            torch.from_numpy(block)
            for _, blocks in self.collection.chunks()
            for block in blocks
        )
        self.open()
        self._plaid.create(documents_embeddings=list(tokens))

    def open(self) -> None:
        self._plaid = import_module("fast_plaid.search").FastPlaid(
            index=str(self.folder / "plaid"), device="cpu"
        )

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        words = torch.from_numpy(query.words)[None]
        results = self._plaid.search(
            queries_embeddings=words, top_k=k, n_ivf_probe=effort, show_progress=False
        )
        return [int(position) for position, _ in results[0]]


class QdrantEdge(System):
    """Qdrant in this process: the embeddings choose the pool, and MaxSim of the
    tokens sorts it.
    """

    settings = (
        "HNSW over embeddings (m 16, ef_construct 100), float16 multivectors on disk"
        " without HNSW"
    )
    package = "qdrant_edge"

    def build(self) -> None:
        qdrant: Any = import_module("qdrant_edge")
        d = self.collection.tokens.shape[2]
        embed_dim = self.collection.embeddings.shape[1]
        token_vectors = qdrant.EdgeVectorParams(
            size=d,
            distance=qdrant.Distance.Dot,
            multivector_config=qdrant.MultiVectorConfig(
                qdrant.MultiVectorComparator.MaxSim
            ),
            datatype=qdrant.VectorStorageDatatype.Float16,
            memory=qdrant.Memory.Cold,
            hnsw_config=qdrant.HnswIndexConfig(
                m=0, ef_construct=100, full_scan_threshold=10_000
            ),
        )
        embedding = qdrant.EdgeVectorParams(
            size=embed_dim,
            distance=qdrant.Distance.Dot,
            hnsw_config=qdrant.HnswIndexConfig(
                m=16, ef_construct=100, full_scan_threshold=10_000
            ),
        )
        config = qdrant.EdgeConfig(
            vectors={"embedding": embedding, "tokens": token_vectors}
        )
        (self.folder / "shard").mkdir()
        shard = qdrant.EdgeShard.create(str(self.folder / "shard"), config)
        for positions, tokens in self.collection.chunks():
            vectors = zip(
                self.collection.embeddings[positions].tolist(),
                tokens.tolist(),
                strict=True,
            )
            points = [
                qdrant.Point(number, {"embedding": embedding, "tokens": block}, {})
                for number, (embedding, block) in enumerate(vectors, positions.start)
            ]
            shard.update(qdrant.UpdateOperation.upsert_points(points))
        shard.optimize()
        shard.flush()
        shard.close()

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
    """`TokenIndex.search` over the index that the vectors come from, with the text
    tower and the joint encoder.
    """

    settings = "the whole search from the text, the score of the bundle, tokens in bf16"
    precision: ClassVar[str] = "bf16"
    needs_images = True

    def build(self) -> None:
        """Write nothing."""

    def open(self) -> None:
        self._index = TokenIndex.open(
            self.collection.index, self.collection.model, precision=self.precision
        )
        self._positions = {
            int(row): position for position, row in enumerate(self.collection.row_ids)
        }

    def search(self, query: VectorQuery, k: int, effort: int) -> list[int]:
        hits = self._index.search(query.text, k, max(k, effort))
        return [self._positions[hit.row_id] for hit in hits]


_PRECISIONS = ("bf16", "fp8", "nvfp4", "sign1")
SYSTEMS: dict[str, type[System]] = {
    **{
        f"edje-index {name}": _of_precision(
            EdjeIndex, name, EdjeIndex.settings.replace("bf16", name)
        )
        for name in _PRECISIONS
    },
    "FAISS and np.memmap": MappedTokens,
    "FAISS and TensorStore": TensorStoreTokens,
    "Qdrant Edge": QdrantEdge,
    "fast-plaid": FastPlaid,
    "Lance multivector": LanceMultivector,
    "Lance exact": LanceExact,
    **{
        f"edje-index {name}, joint encoder": _of_precision(
            FinalScoreSearch, name, FinalScoreSearch.settings.replace("bf16", name)
        )
        for name in _PRECISIONS
    },
}
"""The systems by name."""


def build_system(name: str, folder: str) -> dict[str, Any]:
    """Build a system. Return the bytes of its files, and the seconds."""
    started = time.monotonic()
    files = _files(Path(folder), name)
    SYSTEMS[name](files, Collection.open(Path(folder))).build()
    return {"bytes": _bytes_in(files), "seconds": time.monotonic() - started}


def search_system(
    name: str,
    folder: str,
    effort: int,
    k: int,
    memory: int | None,
    seconds: float | None,
) -> dict[str, Any]:
    """Search for every query, first cold, then warm.

    Return the hits, the milliseconds of each search, and the peak memory in bytes. With
    `memory`, the process and its page cache get this many bytes. A pass ends after half
    of `seconds`.
    """
    is_capped = memory is not None and _cap_memory(memory)
    # so that its memory does not count as memory of the search
    import_module(SYSTEMS[name].package)
    libraries_bytes = peak_memory()
    system = SYSTEMS[name](_files(Path(folder), name), Collection.open(Path(folder)))
    files = (system.collection.index if system.needs_images else system.folder).rglob(
        "*"
    )
    # before they are mapped
    evict(path for path in files if path.is_file())
    system.open()
    queries = system.collection.queries
    positions = list[list[int]]()
    passes = list[list[float]]()
    for query in queries[:_WARM_UP]:
        system.search(query, k, effort)
    for _ in ("cold", "warm"):
        positions = []
        milliseconds = list[float]()
        started = time.monotonic()
        for query in queries:
            if (
                milliseconds
                and seconds is not None
                and time.monotonic() - started > seconds / 2 / len(system.efforts)
            ):
                break
            before = time.perf_counter()
            positions.append(system.search(query, k, effort))
            milliseconds.append(1e3 * (time.perf_counter() - before))
        passes.append(milliseconds)
    used = {
        "libraries_bytes": libraries_bytes,
        "peak_bytes": peak_memory(),
        "is_capped": is_capped,
    }
    return {
        "positions": positions,
        "milliseconds": passes[1],
        "cold_milliseconds": passes[0],
        **used,
    }


def _cap_memory(limit: int) -> bool:
    """Move this process into a control group with at most `limit` bytes. Return
    False if the system refuses.
    """
    for root, name in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(root) / "edje-bench"
        with contextlib.suppress(OSError):
            group.mkdir(exist_ok=True)
            (group / name).write_text(str(limit))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return True
    return False


def _files(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "-")


def _bytes_in(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)
