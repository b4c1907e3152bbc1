from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest

from edje_index.errors import ModelError
from edje_index.indexing import faiss_index as ann
from edje_index.indexing.faiss_file import FaissFileError, FaissShape, check_faiss_file
from edje_index.indexing.faiss_index import AnnIndex, add_ann, build_ann
from storage_formats import CorruptIndexError, Manifest
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.shard_table import FileEntry
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import write_random_index

SPEC = IndexSpec(rows=300, shard_size=64, block_shape=(2, 4), embed_dim=12)
HOLES = frozenset({0, 70, 299})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    write_random_index(folder, SPEC, failed=HOLES)
    return folder


@pytest.fixture
def own_root(tmp_path):
    """An index of its own for each test, to damage."""
    folder = tmp_path / "index"
    write_random_index(folder, SPEC, failed=HOLES)
    add_ann(folder)
    return folder


def embeddings(root):
    return read_embeddings(root, SPEC, np.arange(SPEC.rows))


@pytest.mark.parametrize("flat_limit", [1000, 100], ids=["flat", "ivf"])
def test_nearest_rows_are_those_of_a_flat_search(root, monkeypatch, flat_limit):
    monkeypatch.setattr(ann, "FLAT_LIMIT", flat_limit)
    monkeypatch.setattr(ann, "_IVF_PROBES", 10_000)  # every list: then inverted lists are exact as well
    description = add_ann(root).ann
    assert (description["kind"], description["vectors"]) == ("flat" if flat_limit == 1000 else "ivf-flat", 297)
    vectors = embeddings(root)
    kept = np.array([row for row in range(SPEC.rows) if row not in HOLES])
    oracle = faiss.IndexFlatIP(SPEC.embed_dim)
    oracle.add(vectors[kept])
    index = AnnIndex.open(root)
    for row in kept[::25]:
        rows, scores = index.nearest(vectors[row], 7)
        expected_scores, expected = oracle.search(vectors[row][None], 7)
        assert rows.tolist() == kept[expected[0]].tolist()
        np.testing.assert_allclose(scores, expected_scores[0], atol=1e-6)
        assert rows[0] == row
    assert len(index.nearest(vectors[1], 10_000)[0]) == 297


def test_same_embeddings_give_the_same_bytes(root):
    assert build_ann(root, SPEC) == build_ann(root, SPEC)


def test_query_of_another_width_is_refused(root):
    add_ann(root)
    with pytest.raises(ModelError, match="has width 5, but the embeddings of the index have width 12"):
        AnnIndex.open(root).nearest(np.ones(5, np.float32), 1)


def test_damaged_index_is_one_clear_error(own_root):
    (own_root / "ann" / "index.faiss").write_bytes(b"nonsense")
    with pytest.raises(
        CorruptIndexError, match=r"the FAISS file has 8 bytes instead of the \d+ in index.json; run 'edje-index verify"
    ):
        AnnIndex.open(own_root)


def test_missing_file_is_one_clear_error(own_root):
    (own_root / "ann" / "index.faiss").unlink()
    with pytest.raises(CorruptIndexError, match="No such file or directory"):
        AnnIndex.open(own_root)


def test_the_file_of_another_index_is_refused(own_root, tmp_path):
    other = tmp_path / "other"
    write_random_index(other, SPEC)
    add_ann(other)
    spare = np.fromfile(other / "ann" / "index.faiss", dtype=np.uint8)
    path = own_root / "ann" / "index.faiss"
    spare[: path.stat().st_size].tofile(path)
    with pytest.raises(CorruptIndexError, match="the FAISS file has the CRC-32C"):
        AnnIndex.open(own_root)


def commit(root: Path, index: faiss.Index) -> None:
    """Make `index` the FAISS file of the index at `root`, with a correct checksum in `index.json`."""
    layout, manifest = Layout(root), Manifest.load(root)
    faiss.write_index(index, str(layout.ann_index))
    files = [FileEntry.of(layout, layout.ann_index).to_json()]
    replace(manifest, ann={**manifest.ann, "files": files}).write(layout)


def test_lists_on_disk_are_refused(own_root, tmp_path):
    """FAISS would open the file that holds the lists for writing, whatever its path."""
    vectors = embeddings(own_root)
    vectors = vectors[~np.isnan(vectors[:, 0])]
    lists = faiss.IndexIVFFlat(faiss.IndexFlatIP(SPEC.embed_dim), SPEC.embed_dim, 1, faiss.METRIC_INNER_PRODUCT)
    lists.train(vectors)
    on_disk = faiss.OnDiskInvertedLists(1, lists.code_size, str(tmp_path / "lists"))
    lists.replace_invlists(on_disk)
    index = faiss.IndexIDMap2(lists)
    index.add_with_ids(vectors, np.arange(len(vectors)))
    commit(own_root, index)
    with pytest.raises(CorruptIndexError, match="the FAISS file holds the structure 'ilod' instead of ilar"):
        AnnIndex.open(own_root)


@pytest.mark.parametrize(
    ("vectors", "dimensions", "first_id", "message"),
    [
        (297, 12, 10, "ids from 10 to 306, but ids must be in 0..299"),
        (296, 12, 0, "number of vectors in the FAISS file is 296 instead of 297"),
        (297, 13, 0, "number of dimensions in the FAISS file is 13 instead of 12"),
    ],
)
def test_another_shape_is_refused(own_root, vectors, dimensions, first_id, message):
    index = faiss.IndexIDMap2(faiss.IndexFlatIP(dimensions))
    index.add_with_ids(np.zeros((vectors, dimensions), np.float32), np.arange(vectors) + first_id)
    commit(own_root, index)
    with pytest.raises(CorruptIndexError, match=message):
        AnnIndex.open(own_root)


@pytest.mark.parametrize("flat_limit", [1000, 100], ids=["flat", "ivf"])
def test_damage_behind_a_correct_checksum_is_an_error(own_root, monkeypatch, flat_limit):
    """Sizes and ids that are huge or negative, and files that end early, never reach FAISS."""
    monkeypatch.setattr(ann, "FLAT_LIMIT", flat_limit)
    add_ann(own_root)
    path = Layout(own_root).ann_index
    sound, shape = path.read_bytes(), FaissShape(SPEC.embed_dim, vectors=297, rows=SPEC.rows)
    for offset in (4, 8, 37, 41, 45, 74, *range(len(sound) - 297 * 8 - 8, len(sound) - 8, 800)):
        for value in (1 << 40, -1):
            path.write_bytes(sound[:offset] + value.to_bytes(8, "little", signed=True) + sound[offset + 8 :])
            with path.open("rb") as file, pytest.raises(FaissFileError):
                check_faiss_file(file, shape)
    for length in range(0, len(sound), 501):
        path.write_bytes(sound[:length])
        with path.open("rb") as file, pytest.raises(FaissFileError):
            check_faiss_file(file, shape)
