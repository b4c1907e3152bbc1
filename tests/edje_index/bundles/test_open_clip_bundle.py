"""Bundles of plain open_clip towers: from a name, a file or a folder, built, searched, evaluated and mined with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

from edje_index import TokenIndex
from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.import_models import bundle_of_open_clip
from edje_index.errors import ModelError
from edje_index.models.weights import save_weights
from pipelines import build_index
from storage_formats.errors import UsageError
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.towers import clip_config, random_clip
from tests.pipelines.conftest import write_photo

TEXTS = ["a red dog", "a canoe on a lake", "two people walk", "snow", "the city at night", "a bicycle"]


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An open_clip folder with random weights."""
    folder = tmp_path_factory.mktemp("open-clip")
    config = clip_config()
    config.write(folder)
    save_weights(random_clip(config), folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, tower: Path) -> Path:
    """Photos with captions, indexed with the bundle of the folder."""
    folder = tmp_path_factory.mktemp("plain")
    info = bundle_of_open_clip(f"local-dir:{tower}", folder / "model")
    assert (info.block_shape, info.embed_dim, info.trained) == ((1, 32), 24, True)
    for seed in range(6):
        write_photo(folder / "photos" / f"{seed}.jpg", seed)
    build_index(folder / "photos", folder / "photos.edje", folder / "model", engine="inline", threads=1)
    lines = [{"image": f"{seed}.jpg", "caption": TEXTS[seed]} for seed in range(6)]
    (folder / "captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "photos.edje"


def similarities(index: Path, tower: Path) -> np.ndarray:
    """Of TEXTS with the rows, by open_clip's own functions for the texts."""
    clip = random_clip(clip_config())
    with torch.inference_mode():
        texts = clip.encode_text(open_clip.tokenizer.SimpleTokenizer(context_length=16)(TEXTS), normalize=True)
    opened = TokenIndex.open(index)
    return texts.numpy() @ read_embeddings(opened.committed, np.arange(6)).T


def test_search_follows_the_embeddings_without_tokens(index: Path, tower: Path) -> None:
    expected = similarities(index, tower)
    opened = TokenIndex.open(index)
    for text, row in zip(TEXTS, expected, strict=True):
        hits = opened.search(text, k=3, pool=6)
        assert [hit.row_id for hit in hits] == np.argsort(-row)[:3].tolist()
        assert [hit.score for hit in hits] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-5)
    with pytest.raises(ModelError, match="stores features for training"):
        opened.search("a dog", score="logit")


def test_texts_are_re_ranked_by_the_joint_encoder(tmp_path: Path, tiny_bundle: Path) -> None:
    for seed in range(3):
        write_photo(tmp_path / "photos" / f"{seed}.jpg", seed)
    build_index(tmp_path / "photos", tmp_path / "photos.edje", tiny_bundle, engine="inline", threads=1)
    opened, bundle = TokenIndex.open(tmp_path / "photos.edje"), ModelBundle.load(tiny_bundle)
    texts = bundle.text.encode(TEXTS) @ read_embeddings(opened.committed, np.array([1]))[0]
    pool = np.argsort(-texts, kind="stable")[:4]
    logits = bundle.joint.score([TEXTS[at] for at in pool], np.repeat(opened.fetch_blocks([1]), 4, axis=0)).numpy()
    hits = opened.search_texts(1, TEXTS, k=3, pool=4)
    assert [hit.position for hit in hits] == pool[np.argsort(-logits)][:3].tolist()
    assert [hit.score for hit in hits] == pytest.approx(np.sort(logits)[::-1][:3], abs=1e-5)
    for arguments in ({"k": 0}, {"k": 5, "pool": 4}):
        with pytest.raises(UsageError, match="k must be"):
            opened.search_texts(1, TEXTS, **arguments)
    photo = tmp_path / "photos" / "1.jpg"
    for image in (str(photo), photo.read_bytes()):  # the same image as row 1, encoded again
        again = opened.search_texts(image, TEXTS, k=3, pool=4)
        assert [hit.position for hit in again] == [hit.position for hit in hits]
        assert [hit.score for hit in again] == pytest.approx([hit.score for hit in hits], abs=1e-5)
    plain = opened.search_texts(1, TEXTS, k=3, score="embedding")
    assert [hit.position for hit in plain] == np.argsort(-texts, kind="stable")[:3].tolist()
    assert {*plain[0].parts} == {"embedding"}
    with pytest.raises(UsageError, match="cannot read the query image"):
        opened.search_texts(b"no image", TEXTS)
    with pytest.raises(UsageError, match="out of range"):
        opened.search_texts(3, TEXTS)
    with pytest.raises(UsageError, match=r"texts\[1\] is empty or blank"):
        opened.search_texts(1, ["a", " "])
