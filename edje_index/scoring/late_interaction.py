"""Late interaction of image tokens and the words of a caption, as in ColBERT (Khattab and Zaharia, 2020).

For each content word of the caption, take the largest cosine similarity with a token of the image. The score is the
mean over the content words.

All word vectors contain their mean, which raises every cosine similarity. Therefore the mean is first subtracted from
words and tokens. The score is meaningful only if the adapter was trained with an alignment phase.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional


def late_interaction(
    captions: Sequence[Sequence[int]],
    tokens: torch.Tensor,
    words: torch.Tensor,
    content: NDArray[np.bool_],
    *,
    mean: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the scores of b pairs, float32 [b], between -1 and 1. A caption without content words has the score 0.

    Args:
        captions: token ids of the caption of each pair.
        tokens: image tokens of each pair [b, m, d].
        words: word vectors of the vocabulary [v, d].
        content: which token ids are content words, bool [v]. See `stop_words.content_token_mask`.
        mean: mean of `words` [d]. If it is None, the mean is computed.
    """
    content_ids = [[token_id for token_id in caption if content[token_id]] for caption in captions]
    lengths = torch.tensor([len(ids) for ids in content_ids])
    is_word = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
    padded_ids = torch.zeros(is_word.shape, dtype=torch.int64)
    padded_ids[is_word] = torch.tensor([token_id for ids in content_ids for token_id in ids], dtype=torch.int64)
    mean = words.mean(dim=0) if mean is None else mean
    queries = functional.normalize(words[padded_ids.to(words.device)] - mean, dim=2)
    keys = functional.normalize(tokens.float() - mean, dim=2)
    best = (queries @ keys.transpose(1, 2)).amax(dim=2)
    is_word = is_word.to(tokens.device)
    return (best * is_word).sum(dim=1) / is_word.sum(dim=1).clamp(min=1)
