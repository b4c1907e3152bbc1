"""Pooled similarity: the cosine similarity of an image's tokens, taken together, with a caption as a whole.

Linear maps bring both sides into one space. An image is represented by the mean, standard deviation and maximum of its
tokens; a caption by its words and by the mean hidden state that the language model gives it without an image.
`training.fitting.pooled_similarity` fits the maps in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from edje_index.models.joint_scorer import SCORE_BATCH, JointScorer

STATISTICS = 3  # mean, standard deviation, maximum


class PooledSimilarity(nn.Module):
    """The fitted maps; zero when new. All tensors are buffers: gradients do not train them.

    Args:
        width: d, width of image tokens and hidden states.
        words: w, number of words that count.
        dim: k, width of the common space.

    Attributes:
        image, image_offset: map of the token statistics, [3 d, k] and [k].
        sentence: map of hidden states [d, k].
        word_numbers: token ids of the words that count, ascending, int64 [w].
        word_weights: weight of each word among those of a caption [w].
        words: vector of each word [w, k].
        caption_offset: offset of the caption map [k].
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
        """The sizes ``words`` and ``dim`` by name."""
        return {"words": self.words.shape[0], "dim": self.words.shape[1]}

    def images(self, tokens: torch.Tensor) -> torch.Tensor:
        """Unit vectors [b, k] of image tokens [b, m, d] of any floating type."""
        return functional.normalize(token_statistics(tokens) @ self.image + self.image_offset, dim=1)

    def captions(self, captions: Sequence[Sequence[int]], sentences: torch.Tensor) -> torch.Tensor:
        """Unit vectors [b, k] of captions, given their token ids and their mean hidden states [b, d]."""
        bags = word_bags(captions, self.word_numbers, self.word_weights)
        return functional.normalize(sentences @ self.sentence + bags @ self.words + self.caption_offset, dim=1)


@dataclass(frozen=True)
class PooledVectors:
    """Computes the vectors of images and captions in the space of the pooled similarity.

    Attributes:
        joint: the joint encoder, whose language model reads the captions.
        pooled: the fitted maps. Without them all vectors have width 0.
    """

    joint: JointScorer
    pooled: PooledSimilarity | None

    @torch.inference_mode()
    def of_captions(self, captions: Sequence[str]) -> torch.Tensor:
        """Unit vectors, float32 [b, k] on the joint encoder's device. A caption that occurs twice is read once."""
        if self.pooled is None:
            return torch.zeros(len(captions), 0, device=self.joint.device)
        distinct = {caption: position for position, caption in enumerate(dict.fromkeys(captions))}
        texts, vectors = list(distinct), []
        for start in range(0, len(texts), SCORE_BATCH) or [0]:
            batch = texts[start : start + SCORE_BATCH]
            sentences = self.joint.sentence_vectors(self.joint.tokenizer.inputs(batch, 0))
            vectors.append(self.pooled.captions(self.joint.tokenizer.caption_ids(batch), sentences))
        return torch.cat(vectors)[torch.tensor([distinct[caption] for caption in captions])]

    @torch.inference_mode()
    def of_images(self, tokens: torch.Tensor) -> torch.Tensor:
        """Unit vectors, float32 [b, k], of image tokens [b, m, d]."""
        device = self.joint.device
        if self.pooled is None:
            return torch.zeros(len(tokens), 0, device=device)
        starts = range(0, len(tokens), SCORE_BATCH) or [0]
        return torch.cat([self.pooled.images(tokens[start : start + SCORE_BATCH].to(device)) for start in starts])


def token_statistics(tokens: torch.Tensor) -> torch.Tensor:
    """Mean, standard deviation and maximum over the tokens [b, m, d] of each image, float32 [b, 3 d]."""
    tokens = tokens.float()
    mean = tokens.mean(dim=1)
    deviation = (tokens - mean[:, None]).square().mean(dim=1).sqrt()  # several times faster than torch.std on a CPU
    return torch.cat([mean, deviation, tokens.amax(dim=1)], dim=1)


def word_bags(captions: Sequence[Sequence[int]], word_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted bags of words, float32 [b, w], each of length 1, or 0 for a caption without any of the words.

    Args:
        captions: token ids of each caption.
        word_ids: token ids of the words that count, ascending [w].
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
