"""Sources on an S3-compatible server: they list and read as local files do, also if
responses are lost or short.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import obstore
import pytest

from edje_index.inputs.ranges import open_ranged
from edje_index.inputs.refs import read_bytes
from pipelines import update_index
from pipelines.sources import open_sources
from pipelines.sources.kinds import iter_all
from storage_formats import TokenStore, UsageError
from storage_formats.remote import files as remote
from storage_formats.remote import objects
from storage_formats.remote.files import ChangedFileError
from storage_formats.remote.objects import ObjectFolder
from tests.object_store import every
from tests.pipelines.conftest import run_build, write_photo
from tests.pipelines.test_build_packed import _pack

# they start a server
pytestmark = pytest.mark.slow
BUCKET = "images"


@pytest.fixture
def proxy(proxy, monkeypatch):
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr("edje_index.images.transient.PAUSES", (0.0,))
    remote._bucket.cache_clear()
    yield proxy
    remote._bucket.cache_clear()


@pytest.fixture
def uploaded(proxy, photos, tmp_path):
    """A local folder, and the same files in the bucket: photos with metadata, and
    packed photos.
    """
    tree = tmp_path / "tree"
    (tree / "packed").mkdir(parents=True)
    _pack(photos, tree / "packed")
    photos.rename(tree / "photos")
    (tree / "photos/01.txt").write_text("a dog")
    (tree / "photos/02.json").write_text('{"licence": "cc0"}')
    write_photo(tree / "photos/sub/é b.jpg", 77)
    write_photo(tree / "photos/.hidden/c.jpg", 78)
    upload(tree)
    return tree


def upload(tree: Path) -> None:
    store = ObjectFolder.open(f"s3://{BUCKET}").store
    # creates the bucket
    obstore.put(store, "first", b"")
    for page in obstore.list(store):
        obstore.delete(store, [entry["path"] for entry in page])
    for path in sorted(tree.rglob("*")):
        if path.is_file():
            obstore.put(store, str(path.relative_to(tree)), path.read_bytes())


def contents(spec: str, base: str) -> list[tuple[str, bytes, object]]:
    """Name below `base`, bytes and metadata of each input."""
    refs = list(iter_all(open_sources([spec])))
    return [(ref.uri.removeprefix(base), read_bytes(ref), ref.metadata) for ref in refs]


@pytest.mark.parametrize("fault", [None, "reset", "503", "truncate"])
def test_a_bucket_reads_as_a_folder(proxy, uploaded, fault):
    local = contents(str(uploaded), str(uploaded))
    if fault is not None:
        proxy.fault = every(4, fault)
    assert contents(f"s3://{BUCKET}", f"s3://{BUCKET}") == local
    assert len(local) == 41


def test_a_directory_and_a_pattern(uploaded):
    for spec in (
        "photos",
        "packed/a.tar.gz",
        "packed/b.zip",
        "packed/c.parquet",
        "packed/*.zip",
        "photos/{01,02}.jpg",
    ):
        assert contents(f"s3://{BUCKET}/{spec}", f"s3://{BUCKET}") == contents(
            f"{uploaded}/{spec}", str(uploaded)
        )
    for spec, problem in (
        ("nothing", "does not exist"),
        ("photos/*.png", "no file matches"),
        ("*/a.zip", "wildcard"),
    ):
        with pytest.raises(UsageError, match=problem):
            open_sources([f"s3://{BUCKET}/{spec}"])
    with pytest.raises(UsageError, match="a request for") as refused:
        open_sources(["s3://another-bucket/photos"])
    assert str(refused.value).count("check the URL") == 1


def test_an_object_that_changes_between_requests_is_never_mixed(uploaded):
    url = f"s3://{BUCKET}/packed/b.zip"
    store = ObjectFolder.open(f"s3://{BUCKET}").store
    data = (uploaded / "packed/b.zip").read_bytes()
    for other in (bytes(len(data)), data[:10]):
        obstore.put(store, "packed/b.zip", data)
        with open_ranged(url.encode()) as file:
            obstore.put(store, "packed/b.zip", other)
            with pytest.raises(
                ChangedFileError,
                match=r"has changed while it was read: 's3://images/packed/b\.zip'",
            ):
                file.pread(10, len(data) - 10)


def test_a_build_and_an_update(proxy, uploaded, config, tmp_path):
    local = replace(
        config(), sources=(f"{uploaded}/photos",), out=tmp_path / "local.edje"
    )
    remote = replace(
        config(), sources=(f"s3://{BUCKET}/photos",), out=tmp_path / "remote.edje"
    )
    run_build(local, lambda event: None)
    proxy.fault = every(5, "reset")
    result = run_build(remote, lambda event: None)
    assert (result.inputs, result.indexed, result.failed) == (11, 10, 1)
    ids = [row for row in range(11) if row != 7]
    assert (
        TokenStore.open(remote.out).fetch(ids) == TokenStore.open(local.out).fetch(ids)
    ).all()
    write_photo(uploaded / "photos/new.jpg", 99)
    (uploaded / "photos/00.jpg").unlink()
    upload(uploaded)
    changed = update_index(remote.out, engine="inline", on_event=lambda event: None)
    assert (changed.new, changed.vanished, changed.unchanged) == (1, 1, 9)
