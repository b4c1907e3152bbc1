"""Sources on an S3-compatible server: they list and read as local files do, also if
responses are lost or short.
"""

import obstore
import pytest

from edje_index.inputs.refs import read_bytes
from pipelines.sources import open_sources
from pipelines.sources.kinds import iter_all
from storage_formats import UsageError
from storage_formats.remote import files as remote
from storage_formats.remote import objects
from storage_formats.remote.objects import ObjectFolder
from tests.object_store import every
from tests.pipelines.conftest import write_photo
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


def upload(tree):
    store = ObjectFolder.open(f"s3://{BUCKET}").store
    # creates the bucket
    obstore.put(store, "first", b"")
    for page in obstore.list(store):
        obstore.delete(store, [entry["path"] for entry in page])
    for path in sorted(tree.rglob("*")):
        if path.is_file():
            obstore.put(store, str(path.relative_to(tree)), path.read_bytes())


def contents(spec, base):
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
