"""The alignment score S of captions and images, and its comparison between two representations.

S is the paper's "Image-Caption Token Alignment": the mean, over the tokens of a caption's content words, of each
token's largest cosine similarity with a stored token of the image. Word vectors and tokens are compared as they are.
(The late interaction of the final score subtracts the mean word vector and has stop words of its own.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from edje_index.evaluation.interpretation.caption_words import content_words
from edje_index.models.bf16 import as_tensor
from edje_index.models.joint_scorer import JointScorer
from storage_formats.codecs import Blocks
from storage_formats.errors import UsageError

BINS = 30


@torch.inference_mode()
def alignment_scores(joint: JointScorer, captions: Sequence[str], block: Blocks | torch.Tensor) -> NDArray[np.float64]:
    """S of each of `captions` with one image, float64 [c]; NaN for a caption without content words.

    Args:
        joint: the joint encoder, whose word embeddings represent the captions.
        captions: the texts.
        block: stored tokens of the image [m, d].
    """
    ids = joint.tokenizer.caption_ids([content_words(caption) for caption in captions])
    distinct = sorted({token_id for caption in ids for token_id in caption})
    if not distinct:
        return np.full(len(captions), np.nan)
    positions = {token_id: position for position, token_id in enumerate(distinct)}
    words = functional.normalize(joint.word_vectors[distinct].double(), dim=1)
    tokens = functional.normalize(as_tensor(block).to(words.device).double(), dim=1)
    best = (words @ tokens.T).amax(dim=1).tolist()
    return np.array([np.mean([best[positions[i]] for i in caption]) if caption else np.nan for caption in ids])


@dataclass(frozen=True)
class Distribution:
    """Alignment scores of many pairs.

    Attributes:
        pairs: number of pairs.
        mean, deviation: mean and standard deviation (of a sample).
        counts: number of scores in each bin of the histogram.
    """

    pairs: int
    mean: float
    deviation: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class PairedTest:
    """A two-sided paired t-test of two representations.

    Attributes:
        difference: mean of the second minus the first.
        t: the statistic.
        p: probability of a mean difference at least this large if the true one were 0; may underflow to 0.0.
        effect_size: Cohen's d of paired samples, the mean difference over its standard deviation.
    """

    difference: float
    t: float
    p: float
    effect_size: float


def distributions(*scores: NDArray[np.float64]) -> tuple[tuple[float, ...], list[Distribution]]:
    """Edges of a common histogram, and the distribution of each of `scores`.

    Raises:
        UsageError: fewer than two pairs.
    """
    if min(map(len, scores)) < 2:
        raise UsageError("an alignment needs at least two captions with content words, of images in the index")
    edges = np.histogram_bin_edges(np.concatenate(scores), BINS)
    made = [
        Distribution(
            len(values),
            float(values.mean()),
            float(values.std(ddof=1)),
            tuple(np.histogram(values, edges)[0].tolist()),
        )
        for values in scores
    ]
    return tuple(edges.tolist()), made


def paired_test(first: NDArray[np.float64], second: NDArray[np.float64]) -> PairedTest:
    """Compare the scores of the same pairs with two representations.

    Raises:
        UsageError: all differences are equal, so that there is nothing to test.
    """
    from scipy.stats import ttest_rel

    differences = second - first
    deviation = float(differences.std(ddof=1))
    if deviation == 0:
        raise UsageError("both representations have the same alignment scores; compare two different ones")
    result = ttest_rel(second, first)
    mean = float(differences.mean())
    return PairedTest(mean, float(result.statistic), float(result.pvalue), mean / deviation)
