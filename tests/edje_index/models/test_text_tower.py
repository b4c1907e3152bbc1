"""Embeddings of many texts."""

from __future__ import annotations

import numpy as np
import pytest

from edje_index.models import text_tower
from edje_index.models.text_tower import embed_texts


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(text_tower, "TEXTS_PER_REPORT", 2)


def test_many_texts_are_embedded_in_parts_and_equal_ones_once(tiny_model):
    texts = ["a long text about a dog", "cat", "a dog", "cat", "red", "house"]
    reports = []
    embeddings = embed_texts(tiny_model.text, texts, lambda *report: reports.append(report))
    np.testing.assert_allclose(embeddings, tiny_model.text.encode(texts), atol=1e-5)
    np.testing.assert_array_equal(embeddings[1], embeddings[3])
    assert reports == [("embedding texts", done, 5) for done in (0, 2, 4, 5)]


def test_a_progress_callback_may_stop_it(tiny_model):
    def stop(activity, done, total):
        if done == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        embed_texts(tiny_model.text, ["cat", "dog", "house"], stop)
