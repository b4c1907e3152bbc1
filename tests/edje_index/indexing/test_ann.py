"""Kinds of FAISS index, recall, and the commands `edje-index ann`."""

import weakref
from dataclasses import replace

import faiss
import numpy as np
import pytest

from edje_index.indexing import faiss_index
from edje_index.indexing.faiss_build import AnnRequest, build_ann, recall_queries
from edje_index.indexing.faiss_index import AnnIndex, AnnKind, rebuild_reasons
from pipelines import delete_rows
from pipelines.jobs.quantize import add_ann
from storage_formats import Manifest, UsageError
from storage_formats.format.layout import IndexSpec, Segment
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Directory
from storage_formats.reading.embeddings import IndexedEmbeddings, read_embeddings
from tests.conftest import write_random_index

SPEC = IndexSpec(600, 128, (1, 2), 16)
CODES = AnnRequest("IVF10,PQ8x4fs", recall=0.9)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "index"
    write_random_index(folder, SPEC, failed=frozenset({3, 130}))
    return folder


@pytest.mark.parametrize(
    ("rows", "width", "memory", "factory"),
    [
        (30_000, 384, None, "Flat"),
        (30_001, 384, None, "IVF173,Flat"),
        (100_000, 384, None, "IVF316,Flat"),
        (100_001, 384, None, "IVF316,PQ192x4fs"),
        (10_000_000, 384, 12 * 1_000_000 * 104, "IVF3162,PQ192x4fs"),
        (10_000_000, 384, 12 * 1_000_000 * 104 - 1, "IVF3162,PQ96x4fs"),
        (100_000_000, 768, 24 * 10**9, "IVF10000,PQ384x4fs"),
        (100_000_000, 768, 22 * 10**9, "IVF10000,PQ192x4fs"),
        (1_000_000, 6, None, "IVF1000,PQ3x4fs"),
        (1_000_000, 7, None, "IVF1000,Flat"),
    ],
)
def test_the_kind_follows_from_rows_width_and_memory(rows, width, memory, factory):
    kind = AnnKind.choose(rows, width, memory)
    assert kind.factory == factory
    assert AnnKind.parse(factory, width) == kind


@pytest.mark.parametrize("rows", [1, 3])
def test_a_few_rows_reach_the_recall_and_need_no_advice(tmp_path, rows):
    write_random_index(tmp_path / "index", IndexSpec(rows, 4, (1, 2), 16))
    manifest = add_ann(tmp_path / "index", AnnRequest("IVF1,Flat"))
    assert manifest.ann["recall"]["value"] == 1
    assert rebuild_reasons(manifest) == []


def test_too_few_vectors_for_the_lists_give_a_flat_index(tmp_path):
    write_random_index(tmp_path / "index", SPEC, failed=frozenset(range(20, 600)))
    manifest = add_ann(tmp_path / "index", AnnRequest("IVF100,PQ8x4fs"))
    assert manifest.ann["kind"] == "flat"
    assert len(AnnIndex(CommittedIndex.open(tmp_path / "index"))) == 20


def test_rows_that_do_not_fit_into_memory_are_refused(root):
    for factory in ("auto", "Flat", "IVF10,Flat"):
        with pytest.raises(
            UsageError,
            match=(
                r"of 600 rows needs 51,840 bytes of memory, but only 51,839 are"
                r" available"
            ),
        ):
            add_ann(root, AnnRequest(factory, memory=51_839))


@pytest.mark.parametrize(
    "factory", ["HNSW32", "IVF0,Flat", "IVF10,PQ5x4fs", "IVF10,PQ8x8", "Flat\n"]
)
def test_other_factories_are_refused(factory):
    with pytest.raises(
        UsageError, match=r"not supported|5 parts, but the embeddings have 16 values"
    ):
        AnnKind.parse(factory, 16)


def exact(root, queries, k):
    vectors = read_embeddings(CommittedIndex.open(root), np.arange(SPEC.rows))
    kept = np.array([row for row in range(SPEC.rows) if not np.isnan(vectors[row, 0])])
    oracle = faiss.IndexFlatIP(SPEC.embed_dim)
    oracle.add(vectors[kept])
    return kept[oracle.search(queries, k)[1]]


def test_the_stored_recall_is_that_of_a_search(root):
    manifest = add_ann(root, CODES)
    recall = manifest.ann["recall"]
    probes = manifest.ann["probes"]
    assert (recall["k"], manifest.ann["factory"]) == (100, "IVF10,PQ8x4fs")
    assert 0.9 <= recall["value"] < 1
    assert probes in (4, 8)
    row_ids, queries, _ = recall_queries(
        IndexedEmbeddings(Directory(root), SPEC, list(SPEC.shard_numbers()))
    )
    results = AnnIndex(CommittedIndex.open(root)).nearest_to_each(queries, 101)
    shares = [
        len((set(rows.tolist()) & set(exact_rows.tolist())) - {row}) / 100
        for row, (rows, _), exact_rows in zip(
            row_ids, results, exact(root, queries, 101), strict=True
        )
    ]
    assert recall["value"] == pytest.approx(np.mean(shares), abs=1e-4)


@pytest.mark.parametrize("factory", ["IVF40,Flat", "IVF40,PQ8x4fs"])
def test_a_search_finds_as_many_rows_as_there_are(root, factory):
    assert add_ann(root, AnnRequest(factory, recall=0.1)).ann["probes"] == 4
    query = read_embeddings(CommittedIndex.open(root), [0])[0]
    index = AnnIndex(CommittedIndex.open(root))
    for k in (300, 598, 1000):
        assert len(index.nearest(query, k)[0]) == min(k, 598)
    delete_rows(root, rows=range(550))
    rows, _ = AnnIndex(CommittedIndex.open(root)).nearest(query, 40)
    assert len(rows) == 40
    assert (rows >= 550).all()


def test_rows_with_equal_embeddings_cost_no_recall(tmp_path):
    """A placeholder image in every second row: any 100 of its rows are the nearest."""
    write_random_index(tmp_path, SPEC)
    placeholder = clustered(1, 99, 0)[0]
    for shard in SPEC.shard_numbers():
        vectors = clustered(SPEC.shard_size, shard + 1, 0)
        vectors[::2] = placeholder
        vectors.tofile(Directory(tmp_path).embedding_shard(shard))
    request = replace(CODES, recall=0.95)
    ann = build_ann(Directory(tmp_path), SPEC, request=request)
    assert ann["recall"]["value"] >= 0.95


def test_more_candidates_reach_a_recall_that_codes_alone_do_not(root):
    ann = add_ann(root, AnnRequest("IVF10,PQ2x4fs", recall=0.95)).ann
    assert ann["recall"]["value"] >= 0.95
    assert ann["candidates"] in (8, 32)
    index = CommittedIndex.open(root)
    queries = read_embeddings(index, [7, 9])
    (first, _), (second, _) = AnnIndex(index).nearest_to_each(queries, 100)
    for rows, nearest in zip((first, second), exact(root, queries, 100), strict=True):
        assert len(np.intersect1d(rows, nearest)) >= 95
    ann = add_ann(root, AnnRequest("IVF10,PQ2x4fs", recall=0.9)).ann
    assert ann["candidates"] == 8
    # with two candidates per neighbour, all ten were not enough
    assert ann["probes"] < 10


def test_a_missed_recall_is_said_by_info_and_by_the_search(root):
    manifest = add_ann(root, CODES)
    assert not rebuild_reasons(manifest)
    recall = {**manifest.ann["recall"], "value": 0.66, "target": 0.95}
    missed = replace(manifest, ann={**manifest.ann, "recall": recall})
    (reason,) = rebuild_reasons(missed)
    assert "finds 66.0 % of the nearest rows instead of 95 %" in reason
    with pytest.warns(RuntimeWarning, match=r"finds 66.0 %"):
        AnnIndex(CommittedIndex(Directory(root), missed))


def test_what_gpus_do_gives_the_same_file_and_gpus_without_memory_are_not_used(
    root, monkeypatch
):
    """A clone on the CPU takes the place of the one on the GPUs."""
    expected = [file["crc32c"] for file in add_ann(root, CODES).ann["files"]]
    clones = []

    def clone(index, ngpu):
        # other processes need the memory of the others
        assert ngpu == 1
        # FAISS itself keeps no references either
        clones.append(weakref.ref(on_gpus := faiss.clone_index(index)))
        return on_gpus

    def fail(index, ngpu):
        raise RuntimeError("out of memory")

    def end_during_the_work(index, ngpu):
        # it cannot be trained with so few vectors, nor searched
        clones.append(faiss.IndexPQ(index.d, 8, 8))
        return clones[-1]

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    # one trains, one assigns the vectors
    for on_gpus, count in ((clone, 2), (fail, 2), (end_during_the_work, 4)):
        monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", on_gpus)
        assert [
            file["crc32c"] for file in add_ann(root, CODES).ann["files"]
        ] == expected
        assert len(clones) == count


def appended(root, vectors, manifest=None):
    """Append a segment with the embeddings `vectors`, and return the manifest."""
    manifest = manifest or Manifest.load(root)
    layout = Directory(root)
    before = manifest.spec
    segment = Segment(before.shards * SPEC.shard_size, len(vectors))
    spec = replace(SPEC, rows=segment.stop, segments=(*before.used_segments, segment))
    stored = np.full((SPEC.shard_size, SPEC.embed_dim), np.nan, np.float32)
    stored[: len(vectors)] = vectors
    stored.tofile(layout.embedding_shard(before.shards))
    return replace(manifest, spec=spec, ann=manifest.ann_after_append())


def clustered(count, seed, first_dimension):
    """Unit vectors near ten points of the eight dimensions from `first_dimension`
    on.
    """
    rng = np.random.default_rng(seed)
    vectors = 0.3 * np.random.default_rng(seed).standard_normal((count, 16))
    centres = np.random.default_rng(0).standard_normal((10, 8))
    vectors[:, first_dimension : first_dimension + 8] += centres[
        rng.integers(0, 10, count)
    ]
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("factory", ["Flat", "IVF10,PQ8x4fs"])
def test_appended_rows_are_compared_one_by_one(root, factory, monkeypatch):
    before = add_ann(root, AnnRequest(factory))
    manifest = before
    vectors = clustered(40, 77, 0)
    vectors[12] = np.nan
    for start in range(0, 40, 2):
        manifest = appended(root, vectors[start : start + 2], manifest)
    assert manifest.ann == {**before.ann, "rows": 600}
    index = AnnIndex(CommittedIndex(Directory(root), manifest))
    assert len(index) == 598 + 39
    for number, (rows, scores) in enumerate(index.nearest_to_each(vectors[::7], 3)):
        at = 7 * number
        segment = manifest.spec.used_segments[1 + at // 2]
        assert rows[0] == segment.first_row + at % 2
        assert scores[0] == pytest.approx(1, abs=1e-5)
    assert rebuild_reasons(manifest) == []
    monkeypatch.setattr(faiss_index, "FLAT_LIMIT", 39)
    (reason,) = rebuild_reasons(manifest)
    assert "each of 40 appended rows" in reason
    assert rebuild_reasons(replace(manifest, ann=before.ann)) == []


def test_the_commands_build_and_describe(root, run):
    built = run.json("ann", "build", root, "--ann", CODES.ann, "--recall", "0.9")
    assert (built["kind"], built["vectors"]) == ("ivf-pq", 598)
    described = run.json("info", root)
    assert described["ann"]["recall"] == built["recall"]
    assert described["ann_rebuild"] == []
    assert CODES.ann in run.ok("info", root)
    assert "--ann" in run.refused("ann", "build", root, "--ann", "HNSW32")
    run.ok("verify", root)
