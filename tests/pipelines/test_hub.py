"""Copies of indexes and models to and from a server that speaks the protocol of the
Hugging Face Hub.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants, snapshot_download

from edje_index import ModelError
from pipelines import copy_index, copy_model, delete_rows
from storage_formats import (
    CorruptIndexError,
    EdjeError,
    TokenStore,
    UsageError,
    verify_index,
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


def test_an_index_goes_to_the_hub_and_back(
    index: Path, other: Path, hub: Hub, tmp_path: Path
) -> None:
    assert copy_index(index, URL).files == len(contents(index)) - 1
    files = hub.repositories[REPOSITORY]
    assert (hub.private, "| Rows | 21, 1 failed |" in files["README.md"].decode()) == (
        {REPOSITORY},
        True,
    )
    run_here("copy", URL, tmp_path / "back")
    theirs = snapshot_download(
        "owner/photos",
        repo_type="dataset",
        endpoint=hub.url,
        local_dir=tmp_path / "theirs",
    )
    assert contents(tmp_path / "back") == contents(index)
    assert contents(Path(theirs)).items() >= contents(index).items()
    assert verify_index(tmp_path / "back") == []
    blocks = [
        TokenStore.open(each).fetch([3, 17]).view(np.uint16) for each in (URL, index)
    ]
    np.testing.assert_array_equal(*blocks)

    hub.repositories[REPOSITORY]["README.md"] = b"---\nlicense: cc0-1.0\n---\nMine\n"
    delete_rows(index, rows=[3])
    sent = len(hub.uploads)
    copy_index(index, URL)
    assert sent < len(hub.uploads) <= sent + 2
    assert hub.repositories[REPOSITORY]["README.md"].endswith(b"Mine\n")
    assert (
        TokenStore.open(URL).row_ids().tolist()
        == TokenStore.open(index).row_ids().tolist()
    )
    with pytest.raises(
        UsageError,
        match=(
            f"{URL} is at snapshot 1, which .* does not have; choose another"
            " destination"
        ),
    ):
        copy_index(other, URL)
    copy_index(other, URL, replace=True)
    assert hub.repositories[REPOSITORY].items() >= contents(other).items()
    assert (
        hub.repositories[REPOSITORY].keys() - {"README.md", ".gitattributes"}
        == contents(other).keys()
    )


def test_a_model_goes_to_the_hub_and_back(
    tiny_bundle: Path, hub: Hub, tmp_path: Path
) -> None:
    run_here("copy", tiny_bundle, "hf://owner/model")
    files = hub.repositories["owner/model"]
    assert "| Trained | no, the weights are random |" in files["README.md"].decode()
    # as if the upload of the large files had failed
    hub.refused["GET /lfs/"] = 404
    with pytest.raises(ModelError, match=r"404 .*; check the name of the repository"):
        copy_model("hf://owner/model", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    hub.refused.clear()
    assert (
        run_here("copy", "hf://owner/model@main", tmp_path / "model")["trained"]
        is False
    )
    assert contents(tmp_path / "model") == contents(tiny_bundle)
    assert sorted(tmp_path.glob(".model*")) == []

    weights = files["adapter.safetensors"]
    files["adapter.safetensors"] = weights[:-1] + bytes([weights[-1] ^ 1])
    hub.commits["owner/model"] += 1
    with pytest.raises(ModelError, match="has changed since the bundle was made"):
        copy_model("hf://owner/model", tmp_path / "tampered")
    info = json.loads(files["bundle.json"])
    info["files"]["../../escaped"] = info["files"].pop("adapter.safetensors")
    files["bundle.json"] = json.dumps(info).encode()
    hub.commits["owner/model"] += 1
    with pytest.raises(ModelError):
        copy_model("hf://owner/model", tmp_path / "hostile")
    assert not (tmp_path.parent / "escaped").exists()


def test_errors_say_what_to_do(
    index: Path, tiny_bundle: Path, hub: Hub, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "out"

    def refused(copy, source, target, message, error=EdjeError) -> None:
        with pytest.raises(error, match=message):
            copy(source, target)

    refused(
        copy_index,
        index,
        "hf://owner/photos",
        "an index goes to hf://datasets/OWNER/NAME",
    )
    refused(copy_model, tiny_bundle, URL, "a model to hf://OWNER/NAME")
    refused(copy_index, index, "hf://owner", "names no repository", UsageError)
    refused(copy_index, URL, out, f"there is no index at {URL}", UsageError)
    copy_index(index, URL)
    refused(
        copy_model,
        "hf://owner/photos",
        out,
        "check the name of the repository",
        ModelError,
    )
    hub.refused["POST /api/datasets/owner/photos/commit"] = 412
    refused(
        copy_index,
        index,
        URL,
        "another writer has changed the repository; run the copy again",
    )
    hub.refused.clear()
    hub.repositories[REPOSITORY]["embeddings/c.0.0"] = bytes(100_000)
    refused(
        copy_index, URL, out, "is not the file that was committed", CorruptIndexError
    )
    monkeypatch.setenv("HF_TOKEN", "of somebody else")
    for source, target in ((index, URL), (URL, out)):
        refused(
            copy_index,
            source,
            target,
            "set HF_TOKEN to a token that may do this, or run 'hf auth login'",
        )
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    refused(
        copy_model,
        tiny_bundle,
        "hf://owner/model",
        "401 .*; check the name of the repository; set HF_TOKEN",
    )
    # as `hf auth login` writes it
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    copy_index(index, URL)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused(
        copy_model,
        tiny_bundle,
        "hf://owner/model",
        "check the network, and HF_ENDPOINT and HF_HUB_OFFLINE if they are set",
    )
