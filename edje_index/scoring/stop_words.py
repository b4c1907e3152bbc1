"""Stop words: token ids in a caption that late interaction ignores."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edje_index.models.joint_inputs import SPECIAL_TOKEN_NAMES, JointTokenizer

# Common English function words, which name nothing that an image can show.
_STOP_WORDS = """
a an the this that these those some any each both all one its his her their them they he she it him who which what there
here and or but if while as than then so not no nor is are was were be been being am has have had having do does did
doing can could will would may might shall should must of to from by with without for at in on into onto over under up
down out off through about against between during before after above below again very just also other another such own
same s t
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


@lru_cache(maxsize=8)
def content_token_mask(tokenizer: JointTokenizer) -> NDArray[np.bool_]:
    """Return which token ids of `tokenizer` are content words, bool [v]. The array is read-only and cached.

    Stop words, punctuation and special tokens are not content words.
    """
    mask = np.zeros(len(tokenizer), dtype=bool)
    special_ids = {*map(tokenizer.special_id, SPECIAL_TOKEN_NAMES), tokenizer.image_token_id}
    for word, token_id in tokenizer.tokenizer.get_vocab().items():
        piece = word.removeprefix("##")
        mask[token_id] = token_id not in special_ids and any(map(str.isalnum, piece)) and word not in STOP_WORDS
    mask.flags.writeable = False
    return mask
