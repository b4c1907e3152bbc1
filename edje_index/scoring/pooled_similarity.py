"""Pooled similarity: the cosine similarity of one vector of an image and one vector of a caption.

The vector of an image is a linear map of the mean, standard deviation and maximum over its tokens. The vector of a
caption is a linear map of its bag of words and its mean hidden state in the language model. The module
`training.fitting.pooled_similarity` fits the maps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

STATISTICS = 3  # mean, standard deviation, maximum


class PooledSimilarity(nn.Module):
    """Linear maps from images and from captions to a common space. In a new object, all maps are zero.

    All tensors are buffers, not trainable parameters.

    Args:
        width: width d of image tokens and hidden states.
        words: number w of words in a bag of words.
        dim: width k of the common space.

    Attributes:
        image: map of the token statistics [3 d, k].
        image_offset: offset of image vectors [k].
        sentence: map of mean hidden states [d, k].
        word_numbers: token ids of the words in a bag of words, ascending, int64 [w].
        word_weights: weight of each word in a bag of words [w].
        words: map of bags of words [w, k].
        caption_offset: offset of caption vectors [k].
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
            "image": (STATISTICS * width, dim),
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
        """The sizes ``words`` (number of words in a bag) and ``dim`` (width of the common space)."""
        return {"words": self.words.shape[0], "dim": self.words.shape[1]}

    def images(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the pooled vectors of images, unit vectors [b, k], from image tokens [b, m, d] of any float type."""
        return functional.normalize(token_statistics(tokens) @ self.image + self.image_offset, dim=1)

    def captions(self, captions: Sequence[Sequence[int]], sentences: torch.Tensor) -> torch.Tensor:
        """Return the pooled vectors of captions, unit vectors [b, k].

        Args:
            captions: token ids of each caption.
            sentences: mean hidden state of each caption [b, d].
        """
        bags = word_bags(captions, self.word_numbers, self.word_weights)
        return functional.normalize(sentences @ self.sentence + bags @ self.words + self.caption_offset, dim=1)


def token_statistics(tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean, standard deviation and maximum of the tokens [b, m, d] of each image, float32 [b, 3 d]."""
    tokens = tokens.float()
    mean = tokens.mean(dim=1)
    deviation = (tokens - mean[:, None]).square().mean(dim=1).sqrt()  # several times faster than torch.std on a CPU
    return torch.cat([mean, deviation, tokens.amax(dim=1)], dim=1)


def word_bags(captions: Sequence[Sequence[int]], word_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted bag of words of each caption, float32 [b, w].

    Each bag is a vector of length 1. If a caption contains none of the words, its bag is the zero vector.

    Args:
        captions: token ids of each caption.
        word_ids: token ids of the w words, ascending [w].
        weights: weight of each word [w].
    """
    bags = torch.zeros(len(captions), len(word_ids), device=word_ids.device)
    if not len(word_ids):
        return bags
    rows = torch.tensor([row for row, caption in enumerate(captions) for _ in caption], dtype=torch.int64)
    ids = torch.tensor([token_id for caption in captions for token_id in caption], dtype=torch.int64)
    rows, ids = rows.to(word_ids.device), ids.to(word_ids.device)
    positions = torch.searchsorted(word_ids, ids).clamp(max=len(word_ids) - 1)
    counted = word_ids[positions] == ids
    bags[rows[counted], positions[counted]] = weights[positions[counted]]
    return functional.normalize(bags, dim=1)
