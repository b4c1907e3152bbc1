"""Copies of indexes and models from a server that speaks the protocol of the Hugging
Face Hub.
"""

import json

import numpy as np
import pytest
from huggingface_hub import HfApi, constants

from edje_index import ModelError, TokenIndex
from edje_index.bundles.info import read_bundle_info, verify_files
from edje_index.models.filesystem import new_folder
from pipelines import copy_index
from pipelines.jobs.hub import MODELS, find_model, get_model
from storage_formats import (
    CorruptIndexError,
    EdjeError,
    TokenStore,
    UsageError,
)
from tests.command_line import run_here
from tests.edje_index.bundles.test_published_layouts import (
    LANGUAGE,
    golden,
    towers,
    without_tokenizer,
)
from tests.edje_index.siglip_cases import TOWERS
from tests.edje_index.towers import clip_config, random_clip
from tests.hub_server import TOKEN, hub_server
from tests.pipelines.conftest import write_photo
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


def upload(hub, folder, repository, kind):
    """Upload a folder as `hf upload` does."""
    api = HfApi(hub.url, token=TOKEN)
    api.create_repo(repository, repo_type=kind, private=True, exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=folder, repo_type=kind)


def test_an_index_comes_from_the_hub(index, hub, tmp_path):
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


def test_a_model_comes_from_the_hub(tiny_bundle, hub, tmp_path):
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


def test_errors_say_what_to_do(index, hub, tmp_path, monkeypatch):
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


# Models by name, through the shipped commands

EDJE = MODELS["edje"].parts[0]
CARD = f"---\nlicense: mit\n---\nRe-ranks the top-20 of {TOWERS}."


@pytest.fixture
def named(hub, tmp_path, monkeypatch):
    """The Hub with the authors' repository, which lacks towers and tokenizer."""
    monkeypatch.delenv("HF_TOKEN")
    files = without_tokenizer("compressed_small")
    hub.add(TOWERS, towers(tmp_path))
    hub.add(LANGUAGE, golden("compressed_small")[1])
    hub.add(EDJE, {**files, "README.md": CARD.encode()})
    return hub


def test_the_authors_model_by_name(named, tmp_path, run):
    """From the name to a search; the second use downloads nothing."""
    for seed in range(3):
        write_photo(tmp_path / "photos" / f"{seed}.jpg", seed)
    index = tmp_path / "photos.edje"
    arguments = ("build", tmp_path / "photos", "--model", "edje", "--engine", "inline")
    code, _, error = run(*arguments, "--out", index)
    assert (code, error.count("downloading ")) == (0, 3)
    assert "downloading shahafw/edje-vl-image-retrieval-reranker@" in error
    assert "(0.5 MB)" in error
    named.refused[""] = 500
    again = tmp_path / "again.edje"
    assert run_here(*arguments, "--out", again)["indexed"] == 3

    hits = run_here("search", index, "a red dog", "-k", "2")["hits"]
    assert len(hits) == 2
    for hit in hits:
        relevance = 1 / (1 + np.exp(-hit["parts"]["logit"]))
        assert hit["relevance"] == pytest.approx(relevance, abs=1e-6)
    # the largest pool of the paper
    assert TokenIndex.open(index).default_pool == 50


def test_towers_by_name_search_by_embedding(named, tmp_path):
    from edje_index.models.weights import save_weights

    config = clip_config()
    folder = tmp_path / "open-clip"
    folder.mkdir()
    config.write(folder)
    save_weights(random_clip(config), folder / "open_clip_model.safetensors")
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    named.add(MODELS["siglip2-base"].parts[0], files)
    run_here("model", "get", "siglip2-base", "--out", tmp_path / "base")
    shown = run_here("info", tmp_path / "base")
    assert shown["score"]["t2i"] == "1 x embedding similarity"


def test_models_are_listed_with_their_pages():
    models = {
        each["name"]: each for each in run_here("model", "get", "--list")["models"]
    }
    assert models["edje"]["pages"][0] == f"https://huggingface.co/{EDJE}"
    assert models["demo"]["pages"] == []


def test_without_the_hub_the_demo_model_is_named(named, tmp_path, monkeypatch, run):
    write_photo(tmp_path / "photos" / "0.jpg", 0)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, _, error = run("show", tmp_path / "photos", "--model", "edje")
    assert code == 1
    assert "; the demo model needs no Hub: 'edje-index show" in error
    missing = tmp_path / "nope"
    assert f"{missing} does not exist" in run.refused(
        "show", missing, "--model", "edje"
    )


def test_unknown_names_are_refused(named, tmp_path):
    build = ("build", tmp_path, "--out", tmp_path / "out", "--model", "edji")
    refused = run_here(*build, expect=2)
    assert "there is no model 'edji'; give the directory of a" in refused["error"]
    assert "or one of demo, edje, siglip2-base, siglip2-large;" in refused["error"]
    assert "'model get NAME:TAG --out DIR' an open_clip model" in refused["error"]
    refused = run_here("model", "get", "blip", "--out", tmp_path / "out", expect=2)
    assert (
        "there is no model 'blip'; give hf://ORG/REPO, an open_clip model"
        in json.dumps(refused["error"]).replace('"', "")
    )
    refused = run_here("model", "get", "hf://blip", "--out", tmp_path / "out", expect=1)
    assert "names no repository" in refused["error"]


def test_two_downloads_at_once_leave_one_whole_model(named, tmp_path):
    """The second download runs while the first one says that it begins."""
    found = []

    def find_too(line):
        found[:] = found or [find_model("edje")]

    assert find_model("edje", find_too) == found[0]
    out = tmp_path / "model"
    with pytest.raises(ModelError, match="model exists already"), new_folder(out):
        get_model("edje", out)
    verify_files(read_bundle_info(out))
    assert not [*tmp_path.glob(".model*")]
