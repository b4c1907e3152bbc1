"""Groups of near duplicates."""

import shutil
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from edje_index import delete_rows, near_duplicates
from edje_index.search import duplicates
from pipelines import build_index
from storage_formats import UsageError
from tests.pipelines.conftest import write_photo


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny_bundle):
    """Rows 0, 2 and 4 show one photo in three files; row 3 is no photo."""
    folder = tmp_path_factory.mktemp("duplicates")
    for row in range(7):
        write_photo(folder / "photos" / f"{row}.png", row)
    with Image.open(folder / "photos" / "0.png") as photo:
        for row, level in ((2, 0), (4, 9)):
            path = folder / "photos" / f"{row}.png"
            photo.save(path, compress_level=level)
    (folder / "photos" / "3.png").write_bytes(b"no photo")
    build_index(
        folder / "photos", folder / "i.edje", tiny_bundle, engine="inline", max_failed=1
    )
    return folder / "i.edje"


def test_copies_in_other_files_form_one_group(root):
    groups = near_duplicates(root, 0.999)
    assert [0, 2, 4] in groups
    assert all(3 not in rows for rows in groups)


def test_an_index_without_duplicates_has_no_groups(root, tmp_path):
    copy = shutil.copytree(root, tmp_path / "copy.edje")
    delete_rows(copy, rows=[2, 4])
    assert near_duplicates(copy, 1) == []


@pytest.mark.parametrize("similarity", [0, 1.01, float("nan")])
def test_an_impossible_similarity_is_refused(root, similarity):
    with pytest.raises(UsageError, match="similarity must be"):
        near_duplicates(root, similarity)


def test_a_chain_of_pairs_is_one_group_and_the_largest_group_is_first():
    groups = duplicates._components(10, np.array([5, 1, 2]), np.array([6, 2, 8]))
    assert [group.tolist() for group in groups] == [[1, 2, 8], [5, 6]]


def test_many_alike_images_take_little_memory():
    embeddings = np.ones((4000, 1), np.float32)
    tracemalloc.start()
    first, second = duplicates._pairs(embeddings, 0.9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 16 million pairs of 16 bytes would take 256 MB
    assert peak < 160 << 20
    (group,) = duplicates._components(4000, first, second)
    assert len(group) == 4000


def test_cells_find_the_pairs_that_an_exact_search_finds(monkeypatch):
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(3000, 32)).astype(np.float32)
    embeddings[1::10] = embeddings[::10] + 0.05 * rng.normal(size=(300, 32))
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)

    def pairs():
        first, second = duplicates._pairs(embeddings, 0.95)
        both = zip(first.tolist(), second.tolist(), strict=True)
        return {pair for pair in both if pair[0] < pair[1]}

    exact = pairs()
    assert exact == {(row, row + 1) for row in range(0, 3000, 10)}
    monkeypatch.setattr(duplicates, "_EXACT", 1000)
    monkeypatch.setattr(duplicates, "_CELLS", 40)
    nearby = pairs()
    assert nearby <= exact
    assert len(nearby) > 0.97 * len(exact)
