"""Late interaction of image tokens with the words of a caption, as ColBERT's (Khattab and Zaharia, 2020).

The mean over a caption's content words of the largest cosine with any token of the image. Words and tokens are compared
after the mean word has been taken from both: the vectors of a language model's words share one large component, which
says nothing. It means something where an alignment phase brought the tokens among the words
(`training.losses.alignment_scores` is the same for all pairs of a batch).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional


def late_interaction(
    captions: Sequence[Sequence[int]], tokens: torch.Tensor, words: torch.Tensor, content: NDArray[np.bool_]
) -> torch.Tensor:
    """Scores of pairs, float32 [b] between -1 and 1; 0 for a caption without content words.

    Args:
        captions: word numbers of each pair's caption.
        tokens: image tokens of each pair [b, m, d].
        words: vectors of the vocabulary [v, d].
        content: which words count [v].
    """
    kept = [[word for word in caption if content[word]] for caption in captions]
    lengths = torch.tensor([len(caption) for caption in kept])
    place = torch.arange(max(1, int(lengths.max())))
    there = (place < lengths[:, None]).to(tokens.device)
    numbers = torch.zeros(there.shape, dtype=torch.int64)
    numbers[place < lengths[:, None]] = torch.tensor([word for caption in kept for word in caption], dtype=torch.int64)
    mean = words.mean(dim=0)
    asked = functional.normalize(words[numbers.to(words.device)] - mean, dim=2)
    seen = functional.normalize(tokens.float() - mean, dim=2)
    best = (asked @ seen.transpose(1, 2)).amax(dim=2)
    return (best * there).sum(dim=1) / there.sum(dim=1).clamp(min=1)
