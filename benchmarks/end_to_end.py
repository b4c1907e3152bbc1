"""Compares whole search systems on the same embeddings, tokens and queries: recall,
latency, memory and disk space.

The vectors for late interaction come from a model bundle. Its mean word vector is
subtracted from the image tokens and from the word vectors, and all vectors are scaled
to unit length. The exact score of an image is the MaxSim between the tokens of the
image and the content words of the caption.

For each system and pool, a process of its own runs all searches.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.disk import evict, peak_memory
from benchmarks.fetch.peers import PEERS, StoredRecords, Subject, installed_version
from benchmarks.process import call_in_process
from benchmarks.report import Report, Say, machine
from edje_index.captions.matching import match_items, name_table
from edje_index.captions.reading import read_captions
from edje_index.evaluation.report import table
from edje_index.indexing.faiss_index import AnnIndex
from edje_index.models.joint_scorer import JointScorer
from edje_index.scoring.parts import content_token_mask
from edje_index.search.late_interaction_search import LateInteractionSearch, max_sim
from edje_index.search.token_index import TokenIndex
from pipelines.environment import environment
from pipelines.jobs.ann import add_ann
from storage_formats.arrays import Floats, Ints
from storage_formats.codecs import BF16
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.tombstones import live_rows
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.token_store import TokenStore
from storage_formats.writing.index_writer import IndexWriter

CUTOFFS = (1, 5, 10)
POOLS = (20, 100, 400)
_PRECISIONS = ("bf16", "fp8", "nvfp4", "sign1")
_CHUNK = 256
# number of searches before the timed searches
_WARM_UP = 3


def bench_end_to_end(
    index: Path,
    captions: Path,
    folder: Path,
    say: Say,
    *,
    images: Path | None = None,
    model: Path | None = None,
    queries: int = 200,
) -> Report:
    """Build every system from the same vectors, search with each, and return the
    report. Linux only.

    The other arguments are arguments and options of `edje-index bench end-to-end`.
    The files in `folder` are removed at the end. `say` receives one line of text per
    system and run.

    Raises:
        UsageError: no caption can be searched for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Lance opens its files by a URL, which needs an absolute path.
    with tempfile.TemporaryDirectory(dir=folder.resolve()) as directory:
        scratch = Path(directory)
        opened = TokenIndex.open(index, model)
        items = read_captions(captions, images)
        items, row_of_item = match_items(
            opened.committed.root, name_table(opened.committed), items
        ).indexed(items)
        every = [
            (text, int(row))
            for item, row in zip(items, row_of_item, strict=True)
            for text in item.captions
        ]
        sample = np.random.default_rng(0).permutation(len(every))[:queries]
        write_collection(scratch, opened, [every[position] for position in sample])
        collection = Collection.open(scratch)
        exact = collection.exact(max(CUTOFFS))
        spec = Manifest.load(collection.index).spec
        m, d = spec.block_shape
        copy = scratch / "copy"
        results = []
        for number, (name, system) in enumerate(SYSTEMS.items(), 1):
            say(f"measuring {name}, {number} of {len(SYSTEMS)}")
            result: Report = {
                "name": name,
                "settings": system.settings,
                "runs": [],
            }
            results.append(result)
            try:
                copy.mkdir()
                files = system.build(collection, copy)
                stored = sum(path.stat().st_size for path in files)
                result["bytes_per_image"] = stored / spec.rows
                for pool in POOLS:
                    searched = call_in_process(
                        "benchmarks.end_to_end:search_system",
                        name,
                        str(scratch),
                        str(copy),
                        [str(path) for path in files],
                        max(CUTOFFS),
                        pool,
                    )
                    run = {"pool": pool, **figures(searched, collection, exact)}
                    result["runs"].append(run)
                    say(
                        f"  pool {pool}: {run['of_exact']:.1f} % of the exact ten,"
                        f" {run['p95_ms']:.1f} ms"
                    )
            except EdjeError as error:
                result["problem"] = str(error)
                say(f"  {error}")
            shutil.rmtree(copy, ignore_errors=True)
    return {
        "environment": environment(),
        "settings": {"index": index.name, "captions": captions.name},
        "collection": {
            "images": spec.rows,
            "block_shape": [m, d],
            "queries": len(collection.queries),
        },
        "systems": results,
    }


def figures(
    searched: Report, collection: Collection, exact: Sequence[Sequence[int]]
) -> Report:
    """Return the recall in percent, the latency, and the memory of one run.

    `searched` is the result of `search_system`. `exact` has, for each query, the
    positions of the images with the highest exact scores.
    """
    answers = searched["positions"]
    hits = [
        [position == query.relevant for position in positions]
        for query, positions in zip(collection.queries, answers, strict=True)
    ]
    shared = [
        len(set(hits_of_query) & set(best)) / len(best)
        for hits_of_query, best in zip(answers, exact, strict=True)
    ]
    p50, p95 = np.percentile(searched["milliseconds"], [50, 95], axis=1).tolist()
    return {
        "recall": {
            str(k): 100 * float(np.mean([any(row[:k]) for row in hits]))
            for k in CUTOFFS
        },
        "of_exact": 100 * float(np.mean(shared)),
        "p50_ms": p50[1],
        "p95_ms": p95[1],
        "cold_p50_ms": p50[0],
        "cold_p95_ms": p95[0],
        "memory_bytes": searched["peak_bytes"],
        "libraries_bytes": searched["libraries_bytes"],
    }


_METHOD = """Every system gets the same embeddings, tokens and queries. Each run is a
process of its own that searches for one caption after the other. The files of the
system are first evicted from the page cache. After three searches to warm up the code,
all captions are searched for twice. The first pass is cold, although later captions
find blocks in the page cache that earlier captions needed. The second pass is warm.

- R@k: percentage of the captions whose photo is among the first k hits.
- Of exact ten: percentage of the ten photos with the highest MaxSim that the system
  finds.
- Memory: peak resident memory, including mapped files. The number in brackets is the
  memory of the imported libraries.
- Bytes per photo: all files of the system. Of an index, they include one precision.
- The time of the text tower is not included."""
_COLUMNS = (
    "system",
    "pool",
    "R@1",
    "R@5",
    "R@10",
    "of exact ten",
    "p50 ms",
    "p95 ms",
    "cold p50",
    "cold p95",
    "memory MiB",
    "bytes per photo",
)
_MILLISECONDS = ("of_exact", "p50_ms", "p95_ms", "cold_p50_ms", "cold_p95_ms")


def report_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report in Markdown."""
    collection = report["collection"]
    m, d = collection["block_shape"]
    yield f"# Whole systems, {report['environment']['date']}\n"
    yield machine(report["environment"])
    yield (
        f"{collection['images']:,} photos of {m} x {d} tokens,"
        f" {collection['queries']:,} captions.\n"
    )
    rows = []
    for system in report["systems"]:
        if "problem" in system:
            rows.append([system["name"], f"stopped: {system['problem']}"])
            rows[-1] += [""] * (len(_COLUMNS) - 2)
        for run in system["runs"]:
            used, libraries = (
                run[key] / 2**20 for key in ("memory_bytes", "libraries_bytes")
            )
            rows.append(
                [
                    system["name"],
                    str(run["pool"]),
                    *(f"{value:.1f}" for value in run["recall"].values()),
                    *(f"{run[key]:.1f}" for key in _MILLISECONDS),
                    f"{used:.0f} ({libraries:.0f})",
                    f"{system['bytes_per_image']:,.0f}",
                ]
            )
    yield from table(_COLUMNS, rows)
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
    """The vectors of n images, in a new index with all measured precisions. In this
    index, the row id of an image is its position in the collection.

    Attributes:
        row_ids: row id of each image in the original index, which the vectors were read
            from, int64 [n].
    """

    index: Path
    queries: list[VectorQuery]
    row_ids: Ints

    @classmethod
    def open(cls, folder: Path) -> Collection:
        """Open a collection that `write_collection` wrote."""
        return cls(
            folder / "index", *pickle.loads((folder / "queries.pickle").read_bytes())
        )

    @property
    def store(self) -> TokenStore:
        """The tokens of highest fidelity."""
        return TokenStore.open(self.index)

    def exact(self, k: int) -> list[list[int]]:
        """Return the positions of the `k` images with the highest MaxSim for each
        query, best first.
        """
        store = self.store
        positions = np.arange(len(self.row_ids))
        return [
            np.argsort(-store.max_sim(query.words, positions), kind="stable")[
                :k
            ].tolist()
            for query in self.queries
        ]


def write_collection(
    folder: Path,
    index: TokenIndex,
    queries: Sequence[tuple[str, int]],
) -> None:
    """Write the vectors of every image in `index`, and of `queries`, which are pairs of
    a caption and a row id.

    Queries without a content word, and queries whose image has no embedding, are left
    out.

    Raises:
        UsageError: no query is left.
    """
    row_ids = live_rows(index.committed)
    embeddings = read_embeddings(index.committed, row_ids)
    present = ~np.isnan(embeddings).any(axis=1)
    row_ids = row_ids[present]
    embeddings = embeddings[present]
    joint = index.model.joint
    with IndexWriter.create(
        folder / "index",
        block_shape=index.manifest.spec.block_shape,
        embed_dim=embeddings.shape[1],
        precisions=_PRECISIONS,
    ) as writer:
        for start in range(0, len(row_ids), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            tokens = index.store.fetch(row_ids[chunk]).astype(np.float32)
            vectors = functional.normalize(torch.from_numpy(embeddings[chunk]), dim=-1)
            writer.append(_unit(torch.from_numpy(tokens), joint), vectors.numpy())
    add_ann(folder / "index")
    positions = {int(row): position for position, row in enumerate(row_ids)}
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
    (folder / "queries.pickle").write_bytes(pickle.dumps((kept, row_ids)))


def _unit(vectors: Tensor, joint: JointScorer) -> Floats:
    unit: Floats = functional.normalize(
        vectors.cpu() - joint.mean_word_vector.cpu(), dim=-1
    ).numpy()
    return unit


class EdjeIndex:
    """`LateInteractionSearch` over one precision."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.settings = f"FAISS chooses the pool, tokens in {precision}"

    def build(self, collection: Collection, folder: Path) -> list[Path]:
        """Write the files of the system to `folder`, and return the paths of all files
        that a search reads. This system writes no files. It reads the files of the
        index, except those of other precisions.
        """
        index = collection.index
        others = set(Manifest.load(index).spec.precisions) - {self.precision}
        return [
            path
            for path in index.rglob("*")
            if path.is_file() and not others & set(path.parts)
        ]

    def open(self, collection: Collection, folder: Path) -> None:
        """Open the files."""
        self._index = LateInteractionSearch.open(collection.index, self.precision)

    def search(self, query: VectorQuery, k: int, pool: int) -> list[int]:
        """Return the positions of the `k` best images, best first."""
        hits = self._index.search(query.words, k, embedding=query.embedding, pool=pool)
        return [hit.row_id for hit in hits]


class StoredTokens:
    """FAISS chooses the pool, and a library of `bench fetch` reads the tokens. The
    methods are those of `EdjeIndex`.
    """

    def __init__(self, store: str) -> None:
        self.store = store
        self.settings = (
            f"FAISS chooses the pool, bfloat16 tokens, MaxSim in NumPy,"
            f" {PEERS[store].setting}"
        )

    def _subject(self, collection: Collection, folder: Path) -> Subject:
        records = StoredRecords(collection.index, "bf16", len(collection.row_ids))
        return PEERS[self.store](records, folder)

    def build(self, collection: Collection, folder: Path) -> list[Path]:
        if installed_version(self.store) is None:
            raise EdjeError(f"{PEERS[self.store].package} is not installed")
        subject = self._subject(collection, folder)
        if subject.copies:
            subject.prepare()
        return [*subject.files(), *(collection.index / "ann").iterdir()]

    def open(self, collection: Collection, folder: Path) -> None:
        self._opened = self._subject(collection, folder)
        self._opened.open()
        self._ann = AnnIndex(CommittedIndex.open(collection.index))
        self._shape = collection.store.block_shape

    def search(self, query: VectorQuery, k: int, pool: int) -> list[int]:
        candidates = self._ann.nearest(query.embedding, pool)[0]
        out = np.empty((len(candidates), self._opened.output_bytes), dtype=np.uint8)
        records = np.ascontiguousarray(self._opened.fetch(candidates, out))
        blocks = records.view(BF16).reshape(len(candidates), *self._shape)
        best = np.argsort(-max_sim(query.words, blocks), kind="stable")[:k]
        return [int(position) for position in candidates[best]]


SYSTEMS: dict[str, EdjeIndex | StoredTokens] = {
    **{f"edje-index {name}": EdjeIndex(name) for name in _PRECISIONS},
    **{f"FAISS and {name}": StoredTokens(name) for name in PEERS},
}
"""The systems by name."""


def search_system(
    name: str,
    folder: str,
    copy: str,
    files: Sequence[str],
    k: int,
    pool: int,
) -> Report:
    """Search for every query, first with a cold page cache, then with a warm one.

    Returns:
        `positions`: positions of the hits of each query; `milliseconds`: duration of
        each search in the cold and in the warm pass; `libraries_bytes`: peak memory
        after the imports; `peak_bytes`: peak memory of the process.
    """
    libraries_bytes = peak_memory()
    system = SYSTEMS[name]
    collection = Collection.open(Path(folder))
    # Mapped files cannot be evicted, so evict them before the system opens them.
    evict(map(Path, files))
    system.open(collection, Path(copy))
    for query in collection.queries[:_WARM_UP]:
        system.search(query, k, pool)
    positions = list[list[int]]()
    passes = list[list[float]]()
    for _ in ("cold", "warm"):
        positions = []
        milliseconds = list[float]()
        for query in collection.queries:
            before = time.perf_counter()
            positions.append(system.search(query, k, pool))
            milliseconds.append(1e3 * (time.perf_counter() - before))
        passes.append(milliseconds)
    return {
        "positions": positions,
        "milliseconds": passes,
        "libraries_bytes": libraries_bytes,
        "peak_bytes": peak_memory(),
    }
