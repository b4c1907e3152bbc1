"""Bundles of plain open_clip towers: an index is built and searched with one."""

import numpy as np
import open_clip
import pytest
import torch

from edje_index import TokenIndex
from edje_index.bundles.import_models import bundle_of_towers
from edje_index.errors import ModelError
from edje_index.models.weights import save_weights
from pipelines import build_index
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.towers import clip_config, random_clip
from tests.pipelines.conftest import write_photo

TEXTS = [
    "a red dog",
    "a canoe on a lake",
    "two people walk",
    "snow",
    "the city at night",
    "a bicycle",
]


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    """An open_clip folder with random weights."""
    folder = tmp_path_factory.mktemp("open-clip")
    config = clip_config()
    config.write(folder)
    save_weights(random_clip(config), folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def index(tmp_path_factory, tower):
    """Photos, indexed with the bundle of the folder."""
    folder = tmp_path_factory.mktemp("plain")
    info = bundle_of_towers(f"local-dir:{tower}", folder / "model")
    assert (info.block_shape, info.embed_dim, info.trained) == ((1, 32), 24, True)
    for seed in range(6):
        write_photo(folder / "photos" / f"{seed}.jpg", seed)
    build_index(
        folder / "photos",
        folder / "photos.edje",
        folder / "model",
        engine="inline",
        threads=1,
    )
    return folder / "photos.edje"


def test_search_follows_the_embeddings_without_tokens(index):
    """By open_clip's own functions for the texts."""
    clip = random_clip(clip_config())
    with torch.inference_mode():
        texts = clip.encode_text(
            open_clip.tokenizer.SimpleTokenizer(context_length=16)(TEXTS),
            normalize=True,
        )
    opened = TokenIndex.open(index)
    expected = texts.numpy() @ read_embeddings(opened.committed, np.arange(6)).T
    for text, row in zip(TEXTS, expected, strict=True):
        hits = opened.search(text, k=3, pool=6)
        assert [hit.row_id for hit in hits] == np.argsort(-row)[:3].tolist()
        assert [hit.score for hit in hits] == pytest.approx(
            np.sort(row)[::-1][:3], abs=1e-5
        )
    with pytest.raises(ModelError, match="stores features for training"):
        opened.search("a dog", score="logit")
