"""Late interaction of image tokens and the words of a caption, as in ColBERT (Khattab and Zaharia, 2020).

For each content word of the caption, take the largest cosine similarity with a token of the image. The score is the
mean over the content words.

All word vectors contain their mean, which raises every cosine similarity. Therefore the mean is first subtracted from
words and tokens. The score is meaningful only if the adapter was trained with an alignment phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from edje_index.models.joint_inputs import SPECIAL_TOKEN_NAMES, JointTokenizer

# Common English function words, which name nothing that an image can show.
_STOP_WORDS = """
a an the this that these those some any each both all one its his her their them they he she it him who which what there
here and or but if while as than then so not no nor is are was were be been being am has have had having do does did
doing can could will would may might shall should must of to from by with without for at in on into onto over under up
down out off through about against between during before after above below again very just also other another such own
same s t
"""
_STOP_WORD_SET = frozenset(_STOP_WORDS.split())


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
        content: which token ids are content words, bool [v]. See `content_token_mask`.
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


@lru_cache(maxsize=8)
def content_token_mask(tokenizer: JointTokenizer) -> NDArray[np.bool_]:
    """Return which token ids of `tokenizer` are content words, bool [v]. The array is read-only and cached.

    Stop words, punctuation and special tokens are not content words.
    """
    mask = np.zeros(len(tokenizer), dtype=bool)
    special_ids = {*map(tokenizer.special_id, SPECIAL_TOKEN_NAMES), tokenizer.image_token_id}
    for word, token_id in tokenizer.tokenizer.get_vocab().items():
        piece = word.removeprefix("##")
        mask[token_id] = token_id not in special_ids and any(map(str.isalnum, piece)) and word not in _STOP_WORD_SET
    mask.flags.writeable = False
    return mask
