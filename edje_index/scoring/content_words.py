"""Which words of a vocabulary carry content: those that image tokens are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edje_index.models.joint_inputs import JointTokenizer

# The common function words of English, after which nothing in a picture is named.
_FUNCTION_WORDS = """
a an the this that these those some any each both all one its his her their them they he she it him who which what there
here and or but if while as than then so not no nor is are was were be been being am has have had having do does did
doing can could will would may might shall should must of to from by with without for at in on into onto over under up
down out off through about against between during before after above below again very just also other another such own
same s t
"""
STOPWORDS = frozenset(_FUNCTION_WORDS.split())


def content_words(tokenizer: JointTokenizer) -> NDArray[np.bool_]:
    """For each number of the vocabulary whether it is a word or a piece of one: no mark, punctuation, stopword."""
    words: Any = tokenizer.tokenizer
    content = np.zeros(len(tokenizer), dtype=bool)
    special = set(words.all_special_ids) | {tokenizer.image_token_id}
    for word, number in words.get_vocab().items():
        piece = word.removeprefix("##")
        content[number] = number not in special and any(map(str.isalnum, piece)) and word not in STOPWORDS
    return content
