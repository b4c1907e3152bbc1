"""Fixtures of the tests of the documentation."""

import shutil
import subprocess
import sys

import obstore
import pytest
from huggingface_hub import constants

from storage_formats.remote import files as remote
from storage_formats.remote.objects import ObjectFolder
from tests.command_line import environment
from tests.conftest import REPO
from tests.docs.guide_files import write_guide_files
from tests.hub_server import TOKEN, hub_server
from tests.object_store import s3_server, use_endpoint

# as MkDocs does when it loads hooks
sys.path.insert(0, str(REPO / "docs/hooks"))


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it: any warning is an error."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(
        words, cwd=REPO, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def template(tmp_path_factory, tiny_bundle):
    """A directory with the files that the guides take for granted, see
    `write_guide_files`.
    """
    folder = tmp_path_factory.mktemp("guides") / "home"
    write_guide_files(folder, tiny_bundle)
    return folder


@pytest.fixture
def home(template, tmp_path, monkeypatch):
    """A copy of the files of `template` as the working directory. Rows of the index
    name the photos of `template`.
    """
    folder = tmp_path / "home"
    shutil.copytree(template, folder)
    for name in ("2024", "2025", "m64", "m32", "art"):
        shutil.copytree(folder / "photos.edje", folder / f"{name}.edje")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def servers(home, monkeypatch):
    """Servers for the URLs of the guides: `s3://` leads to an S3-compatible server,
    `hf://` to one with a data set.
    """
    # the server has no Xet storage
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with s3_server() as endpoint, hub_server() as hub:
        use_endpoint(monkeypatch, endpoint)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("EDJE_CACHE", str(home / "cache"))
        store = ObjectFolder.open("s3://bucket").store
        for path in sorted((home / "photos").glob("0000*.png")):
            obstore.put(store, f"photos/{path.name}", path.read_bytes())
        data = (home / "data/train-00000.parquet").read_bytes()
        hub.add("datasets/owner/name", {"data/train-00000.parquet": data})
        yield
        remote._pool(None).clear()
    remote._bucket.cache_clear()
