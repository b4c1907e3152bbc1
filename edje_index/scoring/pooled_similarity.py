"""Pooled similarity: the cosine of all tokens of an image together with a caption as a whole.

Both sides are mapped linearly into one space: an image by mean, deviation and maximum of its tokens, a caption by its
words and by the mean hidden state that the language model gives it alone. Where the matrices come from is in
`training.pooled`. It is fitted in closed form, with ridges: on little data it finds what fine-grained scores miss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

POOLS = 3


class PooledSimilarity(nn.Module):
    """The fitted maps, zero when new. All of them are buffers: nothing here is trained by gradients.

    Args:
        width: d of image tokens and hidden states.
        words: w, words of the vocabulary that are counted.
        dim: k of the common space.

    Attributes:
        image, image_offset: of pooled tokens, [3 d, k] and [k].
        sentence: of hidden states [d, k].
        word_numbers: of the counted words in the vocabulary, ascending, int64 [w].
        word_weights: of a word among those of a caption [w].
        words: what each word adds [w, k].
        caption_offset: [k].
    """

    image: torch.Tensor
    image_offset: torch.Tensor
    sentence: torch.Tensor
    word_numbers: torch.Tensor
    word_weights: torch.Tensor
    words: torch.Tensor
    caption_offset: torch.Tensor

    def __init__(self, width: int, words: int, dim: int) -> None:
        super().__init__()
        shapes = {
            "image": (POOLS * width, dim),
            "image_offset": (dim,),
            "sentence": (width, dim),
            "word_weights": (words,),
            "words": (words, dim),
            "caption_offset": (dim,),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("word_numbers", torch.zeros(words, dtype=torch.int64))

    @property
    def sizes(self) -> dict[str, int]:
        """``words`` and ``dim``."""
        return {"words": self.words.shape[0], "dim": self.words.shape[1]}

    def images(self, tokens: torch.Tensor) -> torch.Tensor:
        """Unit vectors [b, k] of image tokens [b, m, d] of any floating type."""
        return functional.normalize(pooled_tokens(tokens) @ self.image + self.image_offset, dim=1)

    def captions(self, captions: Sequence[Sequence[int]], sentences: torch.Tensor) -> torch.Tensor:
        """Unit vectors [b, k] of captions: numbers of their words, and their mean hidden states [b, d]."""
        bags = word_bags(captions, self.word_numbers, self.word_weights)
        return functional.normalize(sentences @ self.sentence + bags @ self.words + self.caption_offset, dim=1)


def pooled_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Mean, standard deviation and maximum over the tokens [b, m, d] of each image, float32 [b, 3 d]."""
    tokens = tokens.float()
    deviation, mean = torch.std_mean(tokens, dim=1, correction=0)
    return torch.cat([mean, deviation, tokens.amax(dim=1)], dim=1)


def word_bags(captions: Sequence[Sequence[int]], numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Which of the words `numbers` [w] (ascending) each caption has, weighted, of length 1 or 0: float32 [b, w]."""
    bags = torch.zeros(len(captions), len(numbers), device=numbers.device)
    if not len(numbers):
        return bags
    rows = torch.tensor([row for row, caption in enumerate(captions) for _ in caption], dtype=torch.int64)
    words = torch.tensor([word for caption in captions for word in caption], dtype=torch.int64)
    rows, words = rows.to(numbers.device), words.to(numbers.device)
    places = torch.searchsorted(numbers, words).clamp(max=len(numbers) - 1)
    known = numbers[places] == words
    bags[rows[known], places[known]] = weights[places[known]]
    return functional.normalize(bags, dim=1)
