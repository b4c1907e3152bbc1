"""Nearest words and alignment of tokens, against NumPy and SciPy."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import cdist

from edje_index.bundles.bundle import load_scorer
from edje_index.evaluation.explain import (
    Alignment,
    Vocabulary,
    alignment_scores,
    content_words,
)
from edje_index.models.devices import to_bf16_array
from storage_formats.errors import UsageError

CAPTIONS = [
    "A child playing in the ocean.",
    "Two dogs, running!",
    "the of and",
    "",
    "The dog's owner doesn't see the DOGS.",
    "snow snow snow",
]


@pytest.fixture
def joint(tiny_model, tmp_path):
    """The tiny joint encoder with words of different lengths."""
    words = tiny_model.joint.text_embeddings.weight
    with torch.no_grad():
        words.mul_(torch.linspace(0.1, 5, len(words))[:, None])
    info = tiny_model.save(tmp_path / "model")
    return load_scorer(info, torch.float32, torch.device("cpu")).joint


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A child playing in the ocean.", "child playing ocean"),
        ("“It’s” a Dog—and 2 cats, isn't it?", "dogand 2 cats"),
        ("The of AND.", ""),
        ("Café; naïve", "café naïve"),
    ],
)
def test_content_words(caption, words):
    assert content_words(caption) == words


def test_alignment_is_the_mean_of_the_largest_cosines(joint):
    """As the paper defines it: no mean is subtracted, a word that occurs twice
    counts twice.
    """
    block = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    scores = alignment_scores(joint, CAPTIONS, block)
    words = joint.word_vectors.double().numpy()
    for caption, score in zip(CAPTIONS, scores, strict=True):
        ids = joint.tokenizer.tokenizer.encode(
            content_words(caption), add_special_tokens=False
        ).ids
        if not ids:
            assert np.isnan(score)
            continue
        similarities = 1 - cdist(words[ids], block.double().numpy(), "cosine")
        assert score == pytest.approx(similarities.max(axis=1).mean(), abs=1e-6)
    assert np.isnan(scores).tolist() == [False, False, True, True, False, False]


def test_the_statistics_are_those_of_scipy():
    rng = np.random.default_rng(4)
    first = rng.normal(0.24, 0.05, 400)
    second = first + rng.normal(0.004, 0.03, 400)
    found = Alignment.of(np.append(first, np.nan), np.append(second, 0.1))
    differences = second - first
    expected = stats.ttest_1samp(differences, 0.0)
    assert found.test.t == pytest.approx(expected.statistic, rel=1e-6)
    assert found.test.p == pytest.approx(expected.pvalue, rel=1e-6)
    effect_size = differences.mean() / differences.std(ddof=1)
    assert found.test.effect_size == pytest.approx(effect_size, rel=1e-9)
    assert found.left_out == 1
    for values, distribution in ((first, found.first), (second, found.second)):
        assert distribution.pairs == sum(distribution.counts) == 400
        assert distribution.mean == pytest.approx(np.mean(values))
        assert distribution.deviation == pytest.approx(stats.tstd(values))
        counts, _ = np.histogram(values, found.edges)
        assert list(distribution.counts) == counts.tolist()
    assert Alignment.of(first).test is None
    with pytest.raises(UsageError, match="by the same amount"):
        Alignment.of(first, first)
    with pytest.raises(UsageError, match="at least two captions"):
        Alignment.of(np.array([0.1, np.nan]))


def test_nearest_words_are_those_of_the_plain_computation(joint):
    decoded = to_bf16_array(
        torch.randn(7, 40, 16, generator=torch.Generator().manual_seed(2))
    )
    words = joint.word_vectors.double().numpy()
    distances = cdist(decoded.astype(np.float64).reshape(-1, 16), words, "cosine")
    nearest = Vocabulary(joint).nearest(decoded)
    assert nearest.shape == (7, 40)
    chosen = distances[np.arange(len(distances)), nearest.ravel()]
    # scipy gives NaN for the vector of [PAD], which is 0
    distances[:, joint.tokenizer.image_token_id] = np.nan
    np.testing.assert_allclose(chosen, np.nanmin(distances, axis=1), atol=1e-6)
    assert joint.tokenizer.image_token_id not in nearest
