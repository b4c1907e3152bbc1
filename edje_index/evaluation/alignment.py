"""Measures how well the words of captions align with stored tokens.

The alignment score S is the "Image-Caption Token Alignment" of the EDJE paper. For each
content word of the caption, take the highest cosine similarity with a stored token of
the image. S is the mean of these similarities.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edje_index.models.devices import as_tensor, inference
from edje_index.models.joint_scorer import JointScorer
from edje_index.scoring.parts import late_interaction
from storage_formats.codecs import Blocks
from storage_formats.errors import UsageError

_BINS = 30

# The English stop words of NLTK (Bird, Loper and Klein, "Natural Language Processing
# with Python"). The EDJE paper calls these stop words standard. They have no
# apostrophes here, because `content_words` removes punctuation first.
_STOP_WORDS = """ i me my myself we our ours ourselves you youre youve youll youd your
yours yourself yourselves he him his himself she shes her hers herself it its itself
they them their theirs themselves what which who whom this that thatll these those am is
are was were be been being have has had having do does did doing a an the and but if or
because as until while of at by for with about against between into through during
before after above below to from up down in out on off over under again further then
once here there when where why how all any both each few more most other some such no
nor not only own same so than too very s t can will just don dont should shouldve now d
ll m o re ve y ain aren arent couldn couldnt didn didnt doesn doesnt hadn hadnt hasn
hasnt haven havent isn isnt ma mightn mightnt mustn mustnt needn neednt shan shant
shouldn shouldnt wasn wasnt weren werent won wont wouldn wouldnt """
_STOP_WORD_SET = frozenset(_STOP_WORDS.split())


@dataclass(frozen=True)
class AlignmentScores:
    """Statistics of the alignment scores of many pairs of an image and a caption.

    Attributes:
        pairs: number of pairs.
        mean: mean of the scores.
        deviation: sample standard deviation of the scores.
        counts: number of scores in each bin of a histogram. The bins are between
            neighbouring values of `Alignment.edges`.
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
        p: p-value. A very small p-value becomes 0.0.
        effect_size: Cohen's d for paired samples: `difference` / standard deviation of
            the differences.
    """

    difference: float
    t: float
    p: float
    effect_size: float


@dataclass(frozen=True)
class Alignment:
    """Alignment scores of the explained index, and of another index if two indexes are
    compared.

    Attributes:
        edges: edges of the bins of the histograms, ascending.
        first: scores of the explained index.
        second: scores of the other index; None without a comparison.
        test: t-test that compares `second` with `first`; None without a comparison.
        left_out: number of captions without content words. These captions have no
            score.
    """

    edges: tuple[float, ...]
    first: AlignmentScores
    second: AlignmentScores | None
    test: PairedTest | None
    left_out: int

    @classmethod
    def of(cls, *scores: NDArray[np.float64]) -> Alignment:
        """Summarise the scores of the same captions in one or two indexes.

        Args:
            scores: for each index, the score of each caption, float64 [c]. The score of
                a caption without content words is NaN.

        Raises:
            UsageError: fewer than two captions have a score, or the scores of the two
                indexes differ by the same amount for every caption, so that the t-test
                is undefined.
        """
        from scipy.stats import ttest_rel

        has_words = np.logical_and.reduce([~np.isnan(values) for values in scores])
        counted = [values[has_words] for values in scores]
        if len(counted[0]) < 2:
            raise UsageError(
                "alignment needs at least two captions with content words; give more"
                " captions of images in the index"
            )
        edges = np.histogram_bin_edges(np.concatenate(counted), _BINS)
        made = [
            AlignmentScores(
                pairs=len(values),
                mean=float(values.mean()),
                deviation=float(values.std(ddof=1)),
                counts=tuple(np.histogram(values, edges)[0].tolist()),
            )
            for values in counted
        ]
        test = None
        if len(counted) > 1:
            differences = counted[1] - counted[0]
            mean = float(differences.mean())
            deviation = float(differences.std(ddof=1))
            if deviation == 0:
                raise UsageError(
                    "the scores of both indexes differ by the same amount for every"
                    " caption, so the t-test is undefined; compare two different"
                    " indexes"
                )
            result = ttest_rel(counted[1], counted[0])
            test = PairedTest(
                mean, float(result.statistic), float(result.pvalue), mean / deviation
            )
        second = made[1] if len(made) > 1 else None
        return cls(
            tuple(edges.tolist()), made[0], second, test, int((~has_words).sum())
        )


def content_words(caption: str) -> str:
    """Return the words of a caption without stop words and punctuation, in lower case,
    separated by spaces.

    Examples:
        >>> from edje_index.evaluation.alignment import content_words
        >>> content_words("A child playing in the ocean.")
        'child playing ocean'
    """
    kept = "".join(
        character
        for character in caption.lower()
        if character not in string.punctuation
        and not unicodedata.category(character).startswith("P")
    )
    return " ".join(word for word in kept.split() if word not in _STOP_WORD_SET)


@inference()
def alignment_scores(
    joint: JointScorer, captions: Sequence[str], block: Blocks | Tensor
) -> NDArray[np.float64]:
    """Return the score S of each caption with one image, float64 [c]. S is NaN for a
    caption without content words.

    Args:
        block: stored tokens of the image [m, d].
    """
    # The late interaction of the final score subtracts the mean word vector, and has
    # other stop words. S does not: `mean` is 0, and all token ids that `content_words`
    # leaves count as content words.
    ids = joint.tokenizer.caption_ids([content_words(caption) for caption in captions])
    words = joint.word_vectors
    tokens = as_tensor(block).to(words.device)
    scores = late_interaction(
        ids,
        tokens.expand(len(ids), -1, -1),
        words,
        np.ones(len(words), dtype=np.bool_),
        mean=torch.zeros_like(words[0]),
    )
    return np.where(list(map(len, ids)), scores.double().numpy(force=True), np.nan)
