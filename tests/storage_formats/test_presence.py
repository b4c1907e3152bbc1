"""The quick check of an index on an object store looks at the objects, and not at the files in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_formats import CorruptIndexError, IndexSpec, Manifest
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.object_store import ObjectFolder
from storage_formats.presence import check_files
from tests.conftest import write_random_index

obstore_store = pytest.importorskip("obstore.store")
URL = "s3://bucket/photos.edje"


@pytest.fixture
def index(tmp_path: Path) -> CommittedIndex:
    """An index in an object store in memory, and its directory."""
    write_random_index(tmp_path / "i", IndexSpec(rows=5, shard_size=4, block_shape=(2, 8), embed_dim=4))
    folder = ObjectFolder(URL, obstore_store.MemoryStore())
    for path in (each for each in (tmp_path / "i").rglob("*") if each.is_file()):
        folder.store.put(path.relative_to(tmp_path / "i").as_posix(), path.read_bytes())
    return CommittedIndex(tmp_path / "i", Manifest.load(tmp_path / "i"), folder)


def test_files_may_be_missing_in_the_cache(index):
    for path in [*index.root.rglob("zarr.json"), *index.root.rglob("c.*")]:
        path.unlink()
    check_files(index)


@pytest.mark.parametrize("key", ["tokens/bf16/zarr.json", "tokens/bf16/c.1.0.0"])
def test_a_missing_object_is_named_with_advice_for_a_url(index, key):
    assert index.remote is not None
    index.remote.delete([key])
    with pytest.raises(CorruptIndexError, match=f"{URL} is finished but damaged: {key} is missing. Copy the") as raised:
        check_files(index)
    assert "verify" not in str(raised.value)
    assert "delete" not in str(raised.value)
