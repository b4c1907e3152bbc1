"""Images of the caller get rows under names of the caller."""

import shutil

import pytest
from PIL import Image

from edje_index import TokenIndex, read_rows
from pipelines import add_images, append_index, compact_index, delete_rows
from storage_formats import UsageError
from tests.conftest import same_bits
from tests.edje_index.search.indexes import build_photos, photo


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_photos(tmp_path_factory.mktemp("added"))[0]


def test_images_are_added_and_replaced_by_name(built, tmp_path):
    root = shutil.copytree(built, tmp_path / "index")
    damaged = {"exif": b"Exif\0\0garbage", "xmp": b"\xff", "lossless": True}
    Image.linear_gradient("L").save(tmp_path / "new.webp", **damaged)
    append_index(root, tmp_path / "new.webp", engine="inline")
    other = Image.open(tmp_path / "new.webp")
    images = [other, photo(built, 3).read_bytes()]
    columns = [{"captions": ["a red canoe"], "rating": 5}, {}]
    added = add_images(root, images, ["one", "two"], columns)
    index = TokenIndex.open(root)
    assert (added.new, added.changed, added.first_row) == (2, 0, 24)
    # an equal image gets a row of its own
    assert same_bits(index.store.fetch([16, 3]), index.store.fetch([24, 25]))
    # The scores of equal images differ by rounding.
    assert {hit.row_id for hit in index.search_image(other, k=2)} == {16, 24}
    (row,) = read_rows(root, [24], ["rating", "uri"]).to_pylist()
    assert row == {"rating": 5, "uri": "one"}
    replaced = add_images(
        root, [photo(built, 7), other], ["one", "three"], [{"captions": ["a lake"]}, {}]
    )
    assert (replaced.new, replaced.changed, replaced.deleted) == (1, 1, 1)
    assert index.refresh() == 3
    (hit,) = index.rerank("a dog", ["one"])
    assert (hit.row_id, hit.described()) == (32, "a lake")
    assert delete_rows(root, where="uri = 'two'").deleted == (25,)
    assert compact_index(root, tmp_path / "dense").rows == 16


def test_if_an_image_fails_nothing_changes(built):
    image = Image.new("RGB", (32, 32))
    for images, uris, message in [
        ([image, b"no image"], ["one", "two"], "two .*not-an-image"),
        ([image, built / "none.jpg"], ["one", "two"], "two .*No such file"),
        ([image, image], ["one", "one"], r"2 uris \(1 different\)"),
    ]:
        with pytest.raises(UsageError, match=message):
            add_images(built, images, uris)
        assert not (built / "build/journal.json").exists()
    assert TokenIndex.open(built).manifest.snapshot.number == 0
