"""The settings of torch in the program that calls the library change no result."""

import contextlib
import hashlib

import numpy as np
import pytest
import torch
from PIL import Image

from edje_index import (
    DeviceFetcher,
    ImageEncoder,
    ModelBundle,
    TokenIndex,
    create_untrained_bundle,
)
from edje_index.bundles.random_bundle import TINY
from edje_index.evaluation.explain import explain_index
from pipelines import build_index
from storage_formats import TokenStore


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


SETTINGS = {
    "float64": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: default_device("meta"),
}


def results(root, model, folder):
    """The results of all kinds of computations, on newly loaded models."""
    image = Image.new("RGB", (40, 30), "red")
    index = TokenIndex.open(root, score="logit=1,late=1,embedding=20")
    encoder = ImageEncoder.open(model)
    tokens, embeddings = encoder.encode(encoder.preprocess(image)[None])
    built = build_index(
        root.parent / "photos", folder / "index", model, engine="inline", threads=1
    )
    create_untrained_bundle(folder / "bundle", sizes=TINY)
    explained = explain_index(root, (1,), query="a dog").rows[0]
    return {
        "search": index.search("a red canoe", 3),
        "search with an image": index.search("a red canoe", 3, image=image),
        "search_image": index.search_image(image, 3),
        "search_texts": index.search_texts(image, ["a dog", "two red canoes"]),
        "rerank": index.rerank("a dog", [0, 1]),
        "score_pairs": index.score_pairs([("a dog", image), ("a red canoe", 1)]),
        "encode": (tokens.tolist(), embeddings.tolist()),
        "joint": ModelBundle.load(model).joint.score("a dog", tokens).tolist(),
        "fetch": DeviceFetcher(index.store, "cpu").fetch([1, 0]).tolist(),
        "build": TokenStore.open(folder / "index").fetch(range(built.rows)).tobytes(),
        "bundle": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (folder / "bundle").rglob("*.safetensors")
        },
        "explain": (explained.words, explained.match and explained.match.parts),
    }


@pytest.fixture(scope="module")
def expected(built, tmp_path_factory):
    return results(*built, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_caller_change_no_result(name, built, expected, tmp_path):
    with SETTINGS[name]():
        found = results(*built, tmp_path)
    changed = {key for key in expected if found[key] != expected[key]}
    if "device" in name:
        # With a default device, torch has no fast path for attention, which changes the
        # rounding of the vision tower.
        for left, right in zip(found["encode"], expected["encode"], strict=True):
            np.testing.assert_allclose(
                np.array(left, np.float32), np.array(right, np.float32), atol=1e-2
            )
        changed -= {"encode", "score_pairs"}
        changed -= {"search_image", "search_texts", "search with an image"}
    assert changed == set()
