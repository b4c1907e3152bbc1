"""Measures how long it takes to build, search and extend a nearest-neighbour index of synthetic embeddings.

The embeddings form clusters. No tokens are written, so ten million rows fit on a small disk. The benchmark calls the
same functions as the commands `build`, `ann` and `append`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.steps import answer_step, run_step
from edje_index.indexing.faiss_index import AnnIndex, AnnRequest, add_ann, extend_ann
from edje_index.indexing.faiss_part import check_faiss
from edje_index.progress import OnProgress
from pipelines.environment import environment
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout, Segment
from storage_formats.format.manifest import Counts, Manifest, created_by
from storage_formats.format.shard_table import FileEntry, write_shard_table
from storage_formats.reading.embeddings import IndexedEmbeddings
from storage_formats.writing.begin import begin_index

_MODULE = "benchmarks.ann"
_CLUSTER_ROWS = 100  # mean number of rows per cluster
_SPREAD = 0.7  # distance of a row from its cluster centre, relative to the spread of the centres


@dataclass(frozen=True)
class AnnBench:
    """Settings of `bench_ann`.

    Attributes:
        folder: folder for the index. The folder must be missing or empty, and is removed at the end.
        rows: number of embeddings.
        width: width of an embedding.
        shard_size: rows per shard.
        appended: number of appended rows, as a fraction of `rows`.
        request: kind and recall of the FAISS index.
    """

    folder: Path
    rows: int = 200_000
    width: int = 384
    shard_size: int = 8192
    appended: float = 0.01
    request: AnnRequest = field(default_factory=AnnRequest)


def bench_ann(bench: AnnBench, on_progress: OnProgress | None = None) -> dict[str, Any]:
    """Run the benchmark and return the report.

    Each measured step runs in a new process, so that the peak memory of the step can be measured.

    Raises:
        UsageError: `bench.folder` exists and is not empty.
    """
    if bench.folder.exists() and any(bench.folder.iterdir()):
        raise UsageError(f"{bench.folder} exists and is not empty; choose a new folder", parameter="folder")
    try:
        generator = Clusters(bench.width, clusters=max(1, bench.rows // _CLUSTER_ROWS))
        write_embeddings(bench, generator, on_progress)
        request = bench.request
        build = run_step(_MODULE, "build", bench.folder, request.ann, request.recall)
        search = run_step(_MODULE, "search", bench.folder)
        append_rows(bench, generator)
        append = run_step(_MODULE, "append", bench.folder)
        after = run_step(_MODULE, "search", bench.folder)
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)
    settings = {"rows": bench.rows, "width": bench.width, "shard_size": bench.shard_size, "appended": bench.appended}
    steps = {"build": build, "search": search, "append": append, "search_after_append": after}
    return {"environment": environment(), "settings": settings, **steps}


class Clusters:
    """Draws unit vectors around random cluster centres.

    As in real embeddings, the variance differs between directions. A random rotation spreads the variance over all
    values.
    """

    def __init__(self, width: int, clusters: int) -> None:
        rng = np.random.default_rng(0)
        self._scale = ((1 + np.arange(width) / 16) ** -0.5).astype(np.float32)
        self._rotation = np.linalg.qr(rng.standard_normal((width, width)))[0].astype(np.float32)
        self._centres = rng.standard_normal((clusters, width), dtype=np.float32)

    def draw(self, count: int, seed: int) -> NDArray[np.float32]:
        """Return `count` vectors [count, width]. Equal seeds give equal vectors."""
        rng = np.random.default_rng([1, seed])
        vectors = _SPREAD * rng.standard_normal((count, len(self._scale)), dtype=np.float32)
        vectors += self._centres[rng.integers(0, len(self._centres), count)]
        vectors = (vectors * self._scale) @ self._rotation
        unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


def write_embeddings(bench: AnnBench, generator: Clusters, on_progress: OnProgress | None = None) -> None:
    """Write only the embeddings and the `index.json` of an index."""
    spec = IndexSpec(bench.rows, bench.shard_size, (1, 1), bench.width)
    begin_index(bench.folder, spec)
    for shard in spec.shard_numbers():
        _write_shard(bench.folder, spec, shard, generator)
        if on_progress:
            on_progress("writing embeddings", shard + 1, spec.shards)
    layout = Layout(bench.folder)
    table = write_shard_table(layout, [(shard, FileEntry(str(shard), 0, 0)) for shard in spec.shard_numbers()])
    counts = Counts(bench.rows, bench.rows, 0)
    model = {"fingerprint": "synthetic"}
    Manifest(spec, counts, model, {}, "plan", table, {"kind": "none"}, created_by()).write(layout)


def _write_shard(root: Path, spec: IndexSpec, shard: int, generator: Clusters) -> None:
    vectors = np.full((spec.shard_size, spec.embed_dim), np.nan, dtype="<f4")
    rows = spec.shard_rows(shard)
    vectors[: len(rows)] = generator.draw(len(rows), shard)
    vectors.tofile(Layout(root).embedding_shard(shard))


def append_rows(bench: AnnBench, generator: Clusters) -> None:
    """Append a segment of embeddings to the index, but do not add the embeddings to the FAISS index."""
    manifest, layout = Manifest.load(bench.folder), Layout(bench.folder)
    first, count = manifest.spec.shards * bench.shard_size, max(1, int(bench.rows * bench.appended))
    segments = (*manifest.spec.used_segments, Segment(first, count))
    spec = replace(manifest.spec, rows=first + count, segments=segments)
    for shard in spec.segment_shards(segments[-1]):
        _write_shard(bench.folder, spec, shard, generator)
    counts = Counts(bench.rows + count, bench.rows + count, 0)
    table = write_shard_table(layout, [(shard, FileEntry("", 0, 0)) for shard in spec.segment_shards(segments[-1])])
    replace(manifest, spec=spec, counts=counts, further_tables=(table,)).write(layout)


def _build(folder: str, ann: str, recall: str) -> dict[str, Any]:
    manifest = add_ann(folder, AnnRequest(ann, float(recall)))
    return {"ann": manifest.ann}


def _append(folder: str) -> dict[str, Any]:
    manifest, layout = Manifest.load(folder), Layout(Path(folder))
    changed = replace(manifest, ann=extend_ann(layout, manifest.spec, manifest.ann))
    changed.write(layout)
    return {"ann": changed.ann}


def _search(folder: str, queries: int = 200, k: int = 100) -> dict[str, Any]:
    """Search for the embeddings of random rows, one query at a time. Return the time per query."""
    index = AnnIndex.open(folder)
    rng = np.random.default_rng(5)
    spec = Manifest.load(folder).spec
    vectors = IndexedEmbeddings(Layout(Path(folder)), spec)[rng.integers(0, spec.used_segments[0].rows, queries)]
    index.nearest(vectors[0], k)
    started, cpu = time.monotonic(), time.process_time()
    for vector in vectors:
        index.nearest(vector, k)
    return {
        "milliseconds_per_query": 1000 * (time.monotonic() - started) / queries,
        "cpu_milliseconds_per_query": 1000 * (time.process_time() - cpu) / queries,
    }


STEPS: dict[str, Callable[..., dict[str, Any]]] = {"build": _build, "append": _append, "search": _search}


if __name__ == "__main__":
    answer_step(STEPS, check_faiss)
