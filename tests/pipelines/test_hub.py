"""Copies of indexes and models from a server that speaks the protocol of the Hugging
Face Hub.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import HfApi, constants

from edje_index import ModelError
from pipelines import copy_index
from pipelines.jobs.hub import get_model
from storage_formats import (
    CorruptIndexError,
    EdjeError,
    TokenStore,
    UsageError,
)
from tests.command_line import run_here
from tests.hub_server import TOKEN, Hub, hub_server
from tests.pipelines.test_copy import contents

URL = "hf://datasets/owner/photos"
REPOSITORY = "datasets/owner/photos"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    # the server has no Xet storage
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def upload(hub: Hub, folder: Path, repository: str, kind: str) -> None:
    """Upload a folder as `hf upload` does."""
    api = HfApi(hub.url, token=TOKEN)
    api.create_repo(repository, repo_type=kind, private=True, exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=folder, repo_type=kind)


def test_an_index_comes_from_the_hub(index: Path, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"there is no index at {URL}"):
        copy_index(URL, tmp_path / "absent")
    upload(hub, index, "owner/photos", "dataset")
    run_here("copy", URL, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(index)
    blocks = [
        TokenStore.open(each).fetch([3, 17]).view(np.uint16) for each in (URL, index)
    ]
    np.testing.assert_array_equal(*blocks)
    with pytest.raises(UsageError, match="can only be read"):
        copy_index(index, URL)
    hub.repositories[REPOSITORY]["embeddings/c.0.0"] = bytes(100_000)
    with pytest.raises(CorruptIndexError, match="is not the file that was committed"):
        copy_index(URL, tmp_path / "damaged")


def test_a_model_comes_from_the_hub(
    tiny_bundle: Path, hub: Hub, tmp_path: Path
) -> None:
    upload(hub, tiny_bundle, "owner/model", "model")
    files = hub.repositories["owner/model"]
    # as if the upload of the large files had failed
    hub.refused["GET /lfs/"] = 404
    with pytest.raises(ModelError, match=r"404 .*; check the name of the repository"):
        get_model("hf://owner/model", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    hub.refused.clear()
    assert not get_model("hf://owner/model@main", tmp_path / "model").trained
    assert contents(tmp_path / "model") == contents(tiny_bundle)
    assert sorted(tmp_path.glob(".model*")) == []

    weights = files["adapter.safetensors"]
    files["adapter.safetensors"] = weights[:-1] + bytes([weights[-1] ^ 1])
    hub.commits["owner/model"] += 1
    with pytest.raises(ModelError, match="has changed since the bundle was made"):
        get_model("hf://owner/model", tmp_path / "tampered")
    info = json.loads(files["bundle.json"])
    info["files"]["../../escaped"] = info["files"].pop("adapter.safetensors")
    files["bundle.json"] = json.dumps(info).encode()
    hub.commits["owner/model"] += 1
    with pytest.raises(ModelError):
        get_model("hf://owner/model", tmp_path / "hostile")
    assert not (tmp_path.parent / "escaped").exists()


def test_errors_say_what_to_do(index: Path, hub: Hub, tmp_path, monkeypatch) -> None:
    upload(hub, index, "owner/photos", "dataset")
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="names no repository"):
        copy_index("hf://owner", out)
    with pytest.raises(ModelError, match="check the name of the repository"):
        get_model("hf://owner/photos", out)
    monkeypatch.setenv("HF_TOKEN", "of somebody else")
    with pytest.raises(EdjeError, match="set HF_TOKEN to a token that may do this"):
        copy_index(URL, out)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"401 .*set HF_TOKEN"):
        get_model("hf://owner/model", out)
    # as `hf auth login` writes it
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    copy_index(URL, out)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="check the network, and HF_ENDPOINT"):
        get_model("hf://owner/model", tmp_path / "model")
