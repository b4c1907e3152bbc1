"""Models by name, through the shipped commands, from a server with the protocol of the
Hugging Face Hub.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from huggingface_hub import constants

from edje_index import TokenIndex
from edje_index.bundles.info import read_bundle_info, verify_files
from edje_index.errors import ModelError
from edje_index.models.filesystem import new_folder
from pipelines.jobs.hub import MODELS, find_model, get_model
from tests.command_line import run_here
from tests.edje_index.bundles.test_published_layouts import (
    LANGUAGE,
    golden,
    towers,
    without_tokenizer,
)
from tests.edje_index.siglip_cases import TOWERS
from tests.edje_index.towers import clip_config, random_clip
from tests.hub_server import hub_server
from tests.pipelines.conftest import write_photo

EDJE = MODELS["edje"].parts[0]
CARD = f"---\nlicense: mit\n---\nRe-ranks the top-20 of {TOWERS}."


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The Hub with the authors' repository, which lacks towers and tokenizer."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add(TOWERS, towers(tmp_path))
        hub.add(LANGUAGE, golden("compressed_small")[1])
        hub.add(
            EDJE,
            {**without_tokenizer("compressed_small"), "README.md": CARD.encode()},
        )
        yield hub


def test_the_authors_model_by_name(hub, tmp_path, run):
    """From the name to a search; the second use downloads nothing."""
    for seed in range(3):
        write_photo(tmp_path / "photos" / f"{seed}.jpg", seed)
    index = tmp_path / "photos.edje"
    arguments = ("build", tmp_path / "photos", "--model", "edje", "--engine", "inline")
    code, _, error = run(*arguments, "--out", index)
    assert (code, error.count("downloading ")) == (0, 3)
    assert "downloading shahafw/edje-vl-image-retrieval-reranker@" in error
    assert "(0.5 MB)" in error
    hub.refused[""] = 500
    again = tmp_path / "again.edje"
    assert run_here(*arguments, "--out", again)["indexed"] == 3

    hits = run_here("search", index, "a red dog", "-k", "2")["hits"]
    assert len(hits) == 2
    for hit in hits:
        relevance = 1 / (1 + np.exp(-hit["parts"]["logit"]))
        assert hit["relevance"] == pytest.approx(relevance, abs=1e-6)
    assert TokenIndex.open(index).default_pool == 50, "the largest pool of the paper"


def test_towers_by_name_search_by_embedding(hub, tmp_path):
    from edje_index.models.weights import save_weights

    config = clip_config()
    folder = tmp_path / "open-clip"
    folder.mkdir()
    config.write(folder)
    save_weights(random_clip(config), folder / "open_clip_model.safetensors")
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    hub.add(MODELS["siglip2-base"].parts[0], files)
    run_here("model", "get", "siglip2-base", "--out", tmp_path / "base")
    shown = run_here("info", tmp_path / "base")
    assert shown["score"]["t2i"] == "1 x embedding similarity"


def test_models_are_listed_with_their_pages():
    models = {
        each["name"]: each for each in run_here("model", "get", "--list")["models"]
    }
    assert models["edje"]["pages"][0] == f"https://huggingface.co/{EDJE}"
    assert models["demo"]["pages"] == []


def test_without_the_hub_the_demo_model_is_named(hub, tmp_path, monkeypatch, run):
    write_photo(tmp_path / "photos" / "0.jpg", 0)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, _, error = run("show", tmp_path / "photos", "--model", "edje")
    assert code == 1
    assert "; the demo model needs no Hub: 'edje-index show" in error
    missing = tmp_path / "nope"
    assert f"{missing} does not exist" in run.refused(
        "show", missing, "--model", "edje"
    )


def test_unknown_names_are_refused(hub, tmp_path):
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


def test_two_downloads_at_once_leave_one_whole_model(hub, tmp_path):
    """The second download runs while the first one says that it begins."""
    found = []

    def find_too(line: str) -> None:
        found[:] = found or [find_model("edje")]

    assert find_model("edje", find_too) == found[0]
    out = tmp_path / "model"
    with pytest.raises(ModelError, match="model exists already"), new_folder(out):
        get_model("edje", out)
    verify_files(read_bundle_info(out))
    assert not [*tmp_path.glob(".model*")]
