"""Finds the nearest word of each stored token, as in "Emerging vision-token semantics" of the EDJE paper.

The nearest word has the word embedding with the highest cosine similarity to the token. The `<image>` placeholder is
left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from edje_index.models.devices import as_tensor
from edje_index.models.joint_inputs import SPECIAL_TOKEN_NAMES
from edje_index.models.joint_scorer import JointScorer
from storage_formats.codecs import Blocks

_CHUNK = 1024  # tokens compared at a time: 125 MB of similarities with 30,522 words
_UNUSED = re.compile(r"\[unused\d+\]")


class Vocabulary:
    """The vocabulary of the joint encoder, with normalised word embeddings."""

    def __init__(self, joint: JointScorer) -> None:
        tokenizer = joint.tokenizer
        self._vectors = functional.normalize(joint.word_vectors.float(), dim=1)
        self._placeholder = tokenizer.image_token_id
        count = len(self._vectors)
        self._words = [tokenizer.tokenizer.id_to_token(token_id) or f"[{token_id}]" for token_id in range(count)]
        self._special = frozenset(map(tokenizer.special_id, SPECIAL_TOKEN_NAMES))

    @torch.inference_mode()
    def nearest(self, blocks: Blocks | torch.Tensor) -> NDArray[np.int64]:
        """Return the token id of the nearest word of each token in `blocks` [k, m, d], int64 [k, m]."""
        tokens = as_tensor(blocks)
        flat = functional.normalize(tokens.reshape(-1, tokens.shape[2]).float(), dim=1)
        nearest = []
        for chunk in torch.split(flat, _CHUNK):
            similarities = chunk @ self._vectors.T
            similarities[:, self._placeholder] = -torch.inf
            nearest.append(similarities.argmax(dim=1))
        ids: NDArray[np.int64] = torch.cat(nearest).reshape(tokens.shape[:2]).numpy()
        return ids

    def word(self, token_id: int) -> str:
        return self._words[token_id]

    def is_unused(self, token_id: int) -> bool:
        """Return True if the token is reserved and was never trained, such as ``[unused0]``."""
        return bool(_UNUSED.fullmatch(self.word(token_id)))

    def is_special(self, token_id: int) -> bool:
        """Return True if the token is a special token, such as ``[SEP]``."""
        return token_id in self._special


@dataclass(frozen=True)
class WordCounts:
    """How often each word is the nearest word of a token.

    Attributes:
        words: (word, count) pairs, most frequent word first.
        tokens: number of tokens.
        special: number of tokens with a special token as nearest word.
        unused: number of tokens with an unused entry of the vocabulary as nearest word.
    """

    words: tuple[tuple[str, int], ...]
    tokens: int
    special: int
    unused: int


def count_words(vocabulary: Vocabulary, token_ids: Iterable[int]) -> WordCounts:
    """Count the nearest words. `token_ids` contains the token id of the nearest word of each token."""
    counts = Counter(token_ids)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], vocabulary.word(item[0])))
    return WordCounts(
        words=tuple((vocabulary.word(token_id), count) for token_id, count in ordered),
        tokens=counts.total(),
        special=sum(count for token_id, count in counts.items() if vocabulary.is_special(token_id)),
        unused=sum(count for token_id, count in counts.items() if vocabulary.is_unused(token_id)),
    )
