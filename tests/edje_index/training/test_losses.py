"""Each loss against a float64 NumPy reference written from the paper's formulas, to 1e-6."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edje_index.training.model.losses import (
    alignment_loss,
    alignment_scores,
    binary_itm_loss,
    distillation_loss,
    itm_loss,
    mlm_loss,
    recovery_loss,
)


@pytest.fixture(params=range(5))
def rng(request):
    return np.random.default_rng(request.param)


def both(array: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
    """The same float32 values for the reference, in float64, and for the code."""
    array = array.astype(np.float32)
    return array.astype(np.float64), torch.from_numpy(array)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def negative_log_share_of_first(rows):
    """Mean of -log(exp(first) / sum of exp) over rows."""
    return np.mean([-np.log(np.exp(row[0]) / np.exp(row).sum()) for row in rows])


def close(value: torch.Tensor, reference: float) -> None:
    assert value.item() == pytest.approx(reference, abs=1e-6)


def test_itm_is_cross_entropy_of_the_positive_against_images_and_texts_averaged(rng):
    (p, positive), (i, images), (t, texts) = (both(rng.normal(0, 2, shape)) for shape in ((7,), (7, 3), (7, 3)))
    by_image = negative_log_share_of_first([[p[a], *i[a]] for a in range(7)])
    by_text = negative_log_share_of_first([[p[a], *t[a]] for a in range(7)])
    close(itm_loss(positive, images, texts), (by_image + by_text) / 2)


def test_binary_itm_weighs_positives_and_negatives_equally(rng):
    (p, positive), (i, images), (t, texts) = (both(rng.normal(0, 2, shape)) for shape in ((7,), (7, 3), (7, 3)))
    true = np.mean(-np.log(sigmoid(p)))
    false = np.mean(-np.log(1 - sigmoid(np.concatenate([i.ravel(), t.ravel()]))))
    close(binary_itm_loss(positive, images, texts), (true + false) / 2)


def test_mlm_is_the_mean_over_masked_tokens(rng):
    logits, tensor = both(rng.normal(0, 3, (11, 50)))
    targets = rng.integers(0, 50, 11)
    reference = np.mean([-np.log(np.exp(row[at]) / np.exp(row).sum()) for row, at in zip(logits, targets, strict=True)])
    close(mlm_loss(tensor, torch.from_numpy(targets)), reference)


def test_mlm_of_nothing_masked_is_zero_with_a_gradient():
    logits = torch.empty(0, 50, requires_grad=True)
    loss = mlm_loss(logits, torch.empty(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0


def test_recovery_is_one_minus_cosine(rng):
    (f, projected), (g, embeddings) = both(rng.normal(size=(6, 24))), both(rng.normal(size=(6, 24)))
    cosines = (f * g).sum(axis=1) / np.sqrt((f**2).sum(axis=1) * (g**2).sum(axis=1))
    close(recovery_loss(projected, embeddings), np.mean(1 - cosines))


def test_distillation_averages_the_means_of_the_three_groups(rng):
    """Positives, negative images and negative texts count alike, although there are three negatives to a positive."""
    sizes = (5, 15, 15)
    groups = [(both(rng.normal(0, 2, size)), both(rng.normal(0, 2, size))) for size in sizes]
    means = []
    for (s, _), (t, _) in groups:
        y, predicted = sigmoid(t), sigmoid(s)
        means.append(np.mean(-(y * np.log(predicted) + (1 - y) * np.log(1 - predicted))))
    loss = distillation_loss([student for (_, student), _ in groups], [teacher for _, (_, teacher) in groups])
    close(loss, sum(means) / 3)


def test_distillation_is_least_where_the_student_agrees():
    teacher = torch.linspace(-3, 3, 7)
    student = teacher.clone().requires_grad_()
    distillation_loss([student], [teacher]).backward()
    assert torch.allclose(student.grad, torch.zeros(7), atol=1e-7)


def test_alignment_is_symmetric_info_nce_of_late_interaction(rng):
    t, tokens = both(rng.normal(size=(4, 5, 8)))
    w, words = both(rng.normal(size=(9, 8)))
    caption = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3])
    cosine = lambda a, b: a @ b / np.sqrt((a @ a) * (b @ b))  # noqa: E731
    expected = np.array(
        [
            [
                np.mean([max(cosine(token, w[at]) for token in image) for at in np.flatnonzero(caption == c)])
                for c in range(4)
            ]
            for image in t
        ]
    )
    shares = torch.from_numpy((caption[:, None] == np.arange(4)) / np.bincount(caption))
    scores = alignment_scores(tokens, words, shares)
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-6)
    logits = expected / 0.1
    images = np.mean([-np.log(np.exp(logits[a, a]) / np.exp(logits[a]).sum()) for a in range(4)])
    texts = np.mean([-np.log(np.exp(logits[a, a]) / np.exp(logits[:, a]).sum()) for a in range(4)])
    close(alignment_loss(torch.from_numpy(expected), torch.tensor(0.1, dtype=torch.float64)), (images + texts) / 2)


def test_alignment_tells_captions_from_those_of_their_set_alone(rng):
    scores = torch.from_numpy(rng.normal(size=(4, 12)))
    temperature = torch.tensor(0.2, dtype=torch.float64)
    apart = [alignment_loss(part, temperature) for part in scores.split(4, dim=1)]
    close(alignment_loss(scores, temperature), sum(part.item() for part in apart) / 3)


def test_a_batch_without_words_scores_nothing():
    scores = alignment_scores(torch.ones(2, 3, 4), torch.empty(0, 4), torch.empty(0, 5))
    assert scores.tolist() == [[0.0] * 5] * 2


def test_a_caption_without_words_scores_nothing():
    scores = alignment_scores(torch.ones(2, 3, 4), torch.ones(1, 4), torch.tensor([[0.0, 1.0]]))
    assert scores.tolist() == [[0, 1], [0, 1]]
