from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.pooled_similarity import (
    MIN_CAPTIONS,
    canonical_maps,
    fit_pooled_similarity,
)
from edje_index.training.start import trained_part


def covariances(
    rng: np.random.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shared = rng.standard_normal((400, 3))
    x = np.concatenate(
        [shared + rng.standard_normal((400, 3)), rng.standard_normal((400, 4))], axis=1
    )
    y = np.concatenate(
        [shared @ rng.standard_normal((3, 3)), rng.standard_normal((400, 2))], axis=1
    )
    x = torch.from_numpy(x - x.mean(0))
    y = torch.from_numpy(y - y.mean(0))
    return x.T @ x / 400, y.T @ y / 400, x.T @ y / 400


def test_canonical_maps_are_defined_by_their_covariances():
    """What makes them canonical: each side uncorrelated under its ridged
    covariance, and across only pair by pair.
    """
    xx, yy, xy = covariances(np.random.default_rng(0))
    left, right = canonical_maps(xx, yy, xy, 4)
    assert (left.shape, right.shape) == ((7, 4), (5, 4))
    ridged = [
        c + 0.1 * torch.linalg.eigvalsh(c).mean() * torch.eye(len(c), dtype=c.dtype)
        for c in (xx, yy)
    ]
    scale = (left.T @ ridged[0] @ left).diagonal()
    torch.testing.assert_close(left.T @ ridged[0] @ left, scale.diag())
    torch.testing.assert_close(right.T @ ridged[1] @ right, scale.diag())
    across = left.T @ xy @ right
    # Scaled on both sides by correlation ** 1.5: the ridged covariances are correlation
    # ** 3, across ** 4.
    torch.testing.assert_close(across, (scale ** (4 / 3)).diag())
    assert scale.tolist() == sorted(scale.tolist(), reverse=True)


def test_it_tells_whose_caption_it_is(case):
    """On what it was fitted to: 24 images in 16 dimensions, their words at random."""
    bundle = ModelBundle.load(case.bundle)
    source = case.source()
    reports = []
    fitted = fit_pooled_similarity(
        trained_part(bundle.adapter),
        bundle.joint,
        source.data,
        0,
        12,
        lambda *report: reports.append(report[1:]),
    )
    assert reports[-1] == (24, 24)
    assert fitted.sizes["dim"] == 12
    data = source.data
    words = fitted.word_numbers.tolist()
    counted = [set(data.caption(at)) for at in range(len(data.records))]
    every = {word for caption in counted for word in caption}
    assert words == sorted(
        word
        for word in every
        if sum(word in caption for caption in counted) >= MIN_CAPTIONS
    )
    bundle = replace(bundle, pooled=fitted, info=None)
    with torch.no_grad():
        tokens = trained_part(bundle.adapter)(
            source.data.blocks(np.arange(data.images)).float()
        ).bfloat16()
    numbers = [data.caption(at) for at in data.caption_starts[:-1]]
    texts = [bundle.joint.tokenizer.tokenizer.decode(ids) for ids in numbers]
    scorer = bundle.scorer
    images = scorer.images(tokens)
    scored = [
        scorer.parts(["pooled"], [text] * len(tokens), images)["pooled"]
        for text in texts
    ]
    scores = torch.from_numpy(np.stack(scored))
    own = scores.diagonal()
    better = (scores > own[:, None]).sum(dim=1).float().mean()
    assert better < 6, "by chance 11.5 other images score higher"
