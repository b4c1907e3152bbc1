"""A bundle with every part of the final score, from random numbers."""

from dataclasses import replace

import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.scoring.parts import PooledSimilarity
from edje_index.scoring.weights import DirectionWeights, ScoreWeights

POOLED_DIM = 5
WEIGHTS = DirectionWeights(
    t2i=ScoreWeights(1.0, 0.75, 3.0, 20.0),
    i2t=ScoreWeights(1.0, 2.0, 6.0, 10.0),
)


def random_pooled_similarity(bundle, captions):
    """A pooled similarity that counts the words of `captions`."""
    word_ids = sorted(
        {word for ids in bundle.joint.tokenizer.caption_ids(captions) for word in ids}
    )
    pooled = PooledSimilarity(bundle.joint.width, len(word_ids), POOLED_DIM)
    rng = torch.Generator().manual_seed(1)
    pooled.load_state_dict(
        {
            name: torch.randn(v.shape, generator=rng)
            for name, v in pooled.state_dict().items()
        }
    )
    pooled.word_numbers = torch.tensor(word_ids, dtype=torch.int64)
    pooled.word_weights.abs_()
    return pooled


def bundle_with_all_parts(path):
    """The bundle at `path` with all parts of the final score."""
    bundle = ModelBundle.load(path)
    pooled = random_pooled_similarity(bundle, ["a dog", "two cats and a house"])
    return replace(bundle, pooled=pooled, score=WEIGHTS, info=None)
