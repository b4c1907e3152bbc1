"""Computes the alignment score S of a caption and an image, and compares the scores of two indexes.

S is the "Image-Caption Token Alignment" of the EDJE paper. For each content word of the caption, take the highest
cosine similarity with a stored token of the image. S is the mean of these similarities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from edje_index.evaluation.interpretation.caption_words import content_words
from edje_index.models.devices import as_tensor
from edje_index.models.joint_scorer import JointScorer
from storage_formats.codecs import Blocks
from storage_formats.errors import UsageError

BINS = 30


@torch.inference_mode()
def alignment_scores(joint: JointScorer, captions: Sequence[str], block: Blocks | torch.Tensor) -> NDArray[np.float64]:
    """Return the score S of each caption with one image, float64 [c]. S is NaN for a caption without content words.

    Args:
        joint: joint encoder, for the word embeddings.
        captions: c captions.
        block: stored tokens of the image [m, d].
    """
    # The late interaction of the final score differs: it subtracts the mean word vector and has other stop words.
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
    """Statistics of the alignment scores of many pairs.

    Attributes:
        pairs: number of pairs.
        mean: mean of the scores.
        deviation: sample standard deviation of the scores.
        counts: number of scores in each bin of the histogram.
    """

    pairs: int
    mean: float
    deviation: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class PairedTest:
    """Result of a two-sided paired t-test between the scores of two indexes.

    Attributes:
        difference: mean of (score with the second index - score with the first index).
        t: t statistic.
        p: p-value. It may underflow to 0.0.
        effect_size: Cohen's d for paired samples: `difference` / standard deviation of the differences.
    """

    difference: float
    t: float
    p: float
    effect_size: float


def distributions(*scores: NDArray[np.float64]) -> tuple[tuple[float, ...], list[Distribution]]:
    """Return the common bin edges of all histograms, and the distribution of each array in `scores`.

    Raises:
        UsageError: an array contains fewer than two scores.
    """
    if min(map(len, scores)) < 2:
        raise UsageError(
            "alignment needs at least two captions with content words; give more captions of images in the index"
        )
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
    """Compare the scores of the same pairs in two indexes with a t-test.

    Raises:
        UsageError: the differences of the scores are all equal, so that the t-test is undefined.
    """
    from scipy.stats import ttest_rel

    differences = second - first
    deviation = float(differences.std(ddof=1))
    if deviation == 0:
        raise UsageError(
            "the scores of both indexes differ by the same amount for every caption, so the t-test is "
            "undefined; compare two different indexes"
        )
    result = ttest_rel(second, first)
    mean = float(differences.mean())
    return PairedTest(mean, float(result.statistic), float(result.pvalue), mean / deviation)
