from __future__ import annotations

import numpy as np
import pytest

from edje_index.bundles.bundle import ModelBundle
from edje_index.models import text_tower as text


@pytest.fixture(scope="module")
def tower(tiny_bundle):
    return ModelBundle.load(tiny_bundle).text


def test_many_texts_are_embedded_in_parts_and_equal_ones_once(tower, monkeypatch):
    monkeypatch.setattr(text, "_CHUNK", 2)
    texts = ["a long text about a dog", "cat", "a dog", "cat", "red", "house"]
    seen = []
    embeddings = text.embed_texts(tower, texts, lambda done, total: seen.append((done, total)))
    np.testing.assert_allclose(embeddings, tower.encode(texts), atol=1e-5)
    np.testing.assert_array_equal(embeddings[1], embeddings[3])
    assert seen == [(0, 5), (2, 5), (4, 5), (5, 5)]


def test_whoever_is_told_of_progress_may_stop_it(tower, monkeypatch):
    monkeypatch.setattr(text, "_CHUNK", 1)

    def stop(done, total):
        if done == 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        text.embed_texts(tower, ["cat", "dog"], stop)
