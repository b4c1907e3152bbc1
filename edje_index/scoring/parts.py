"""The parts of the final score. A part computes one number per pair of a caption and an image.

In shapes, b is the number of pairs, m the tokens per image, d the width of a token, and e the width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.errors import ModelError
from edje_index.models.devices import as_tensor
from edje_index.models.joint_scorer import JointScorer
from edje_index.scoring.hubness import HubnessBank
from edje_index.scoring.late_interaction import late_interaction
from edje_index.scoring.pooled_similarity import PooledSimilarity, PooledVectors
from edje_index.scoring.stop_words import content_token_mask
from edje_index.scoring.weights import EMBEDDING, HUBNESS, LATE, LOGIT, POOLED, TEXT_TO_IMAGE, HubnessSimilarity

Array = np.ndarray[Any, np.dtype[Any]]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Pairs:
    """b pairs of a caption and an image. A field may be left out if no computed part reads the field.

    Attributes:
        captions: one caption per pair.
        tokens: stored tokens of the images [b, m, d], an array or tensor of any floating type.
        similarities: cosine similarity of the caption embedding and the image embedding of each pair, float32 [b].
        candidate_embeddings: image embeddings in direction "t2i", caption embeddings in "i2t", float32 [b, e].
    """

    captions: Sequence[str] = ()
    tokens: torch.Tensor | Array | None = None
    similarities: Floats | None = None
    candidate_embeddings: Floats | None = None
    _image_vectors: dict[PooledVectors, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def token_tensor(self) -> torch.Tensor:
        """The field `tokens` as a tensor."""
        assert self.tokens is not None
        return as_tensor(self.tokens)

    def image_vectors(self, vectors: PooledVectors) -> torch.Tensor:
        """Return the pooled vectors of the images, float32 [b, k]. They are computed once, for all parts."""
        if vectors not in self._image_vectors:
            self._image_vectors[vectors] = vectors.of_images(self.token_tensor)
        return self._image_vectors[vectors]

    def at(self, mask: NDArray[np.bool_]) -> Pairs:
        """Return the pairs at which `mask` [b] is True."""
        return Pairs(
            captions=[caption for caption, kept in zip(self.captions, mask, strict=True) if kept],
            tokens=None if self.tokens is None else self.token_tensor[torch.from_numpy(mask)],
            similarities=None if self.similarities is None else self.similarities[mask],
            candidate_embeddings=None if self.candidate_embeddings is None else self.candidate_embeddings[mask],
        )


class Part(Protocol):
    """Interface of a part of the final score."""

    def of(self, pairs: Pairs) -> Floats:
        """Compute the part for b `pairs`, float32 [b]. Higher values mean better matches."""
        ...


@dataclass(frozen=True)
class Logit:
    """The part ``logit``: the matching logit of the joint encoder. In the EDJE paper, the score is this logit."""

    joint: JointScorer

    def of(self, pairs: Pairs) -> Floats:
        return _numpy(self.joint.score(pairs.captions, pairs.token_tensor))


@dataclass(frozen=True)
class LateInteraction:
    """The part ``late``: mean similarity of each caption word and its nearest image token. See `late_interaction`."""

    joint: JointScorer

    @torch.inference_mode()
    def of(self, pairs: Pairs) -> Floats:
        words, tokenizer = self.joint.word_vectors, self.joint.tokenizer
        content, mean = content_token_mask(tokenizer), self.joint.mean_word_vector

        def score(captions: Sequence[str], tokens: torch.Tensor) -> torch.Tensor:
            return late_interaction(tokenizer.caption_ids(captions), tokens.to(words.device), words, content, mean=mean)

        return _in_batches(pairs, self.joint.batch, score)


@dataclass(frozen=True)
class Pooled:
    """The part ``pooled``: cosine similarity of the pooled vectors of caption and image. See `pooled_similarity`."""

    vectors: PooledVectors

    @torch.inference_mode()
    def of(self, pairs: Pairs) -> Floats:
        return _numpy((self.vectors.of_captions(pairs.captions) * pairs.image_vectors(self.vectors)).sum(dim=1))


@dataclass(frozen=True)
class Embedding:
    """The part ``embedding``: cosine similarity of the embeddings, read from `Pairs.similarities`."""

    def of(self, pairs: Pairs) -> Floats:
        assert pairs.similarities is not None
        return pairs.similarities


@dataclass(frozen=True)
class Hubness:
    """The part ``hubness``: minus the hubness of the candidate. The query has no effect. See `hubness`."""

    bank: HubnessBank
    vectors: PooledVectors
    similarity: HubnessSimilarity
    direction: str

    @torch.inference_mode()
    def of(self, pairs: Pairs) -> Floats:
        assert pairs.candidate_embeddings is not None
        images = self.direction == TEXT_TO_IMAGE
        vectors = pairs.image_vectors(self.vectors) if images else self.vectors.of_captions(pairs.captions)
        embeddings = torch.from_numpy(pairs.candidate_embeddings).to(vectors.device)
        return -_numpy(self.bank.hubness(embeddings, vectors, self.similarity, self.direction))


@dataclass(frozen=True)
class ScoreModels:
    """The models that compute the parts of the final score.

    Attributes:
        joint: the joint encoder.
        pooled: the pooled similarity; None if the bundle has no pooled similarity.
        bank: the hubness bank; None if the bundle has no hubness bank.
    """

    joint: JointScorer
    pooled: PooledSimilarity | None
    bank: HubnessBank | None

    def parts(self, direction: str, similarity: HubnessSimilarity) -> dict[str, Part]:
        """Return every part that these models can compute, by name.

        Args:
            direction: "t2i" or "i2t".
            similarity: how the hubness correction compares candidates with the bank.
        """
        vectors = PooledVectors(self.joint, self.pooled)
        parts: dict[str, Part] = {LOGIT: Logit(self.joint), LATE: LateInteraction(self.joint)}
        if self.pooled is not None:
            parts[POOLED] = Pooled(vectors)
        parts[EMBEDDING] = Embedding()
        if self.bank is not None:
            parts[HUBNESS] = Hubness(self.bank, vectors, similarity, direction)
        return parts


def check_bank(models: ScoreModels) -> None:
    """Raise ModelError if the hubness bank and the pooled similarity have pooled vectors of different widths."""
    if models.bank is None:
        return
    bank_dim, dim = models.bank.sizes["dim"], 0 if models.pooled is None else models.pooled.sizes["dim"]
    if bank_dim != dim:
        raise ModelError(
            f"the hubness bank has vectors of width {bank_dim}, but the pooled similarity has width "
            f"{dim}: use a bank and a pooled similarity of the same training run"
        )


def reads_tokens(parts: Sequence[str], direction: str) -> bool:
    """Return True if a part in `parts` reads image tokens in `direction`."""
    return bool({LOGIT, LATE, POOLED} & set(parts)) or (HUBNESS in parts and direction == TEXT_TO_IMAGE)


def _in_batches(pairs: Pairs, size: int, score: Callable[[Sequence[str], torch.Tensor], torch.Tensor]) -> Floats:
    """Apply `score` to batches of at most `size` pairs."""
    values = np.zeros(len(pairs.captions), dtype=np.float32)
    for start in range(0, len(values), size):
        batch = slice(start, start + size)
        values[batch] = _numpy(score(pairs.captions[batch], pairs.token_tensor[batch]))
    return values


def _numpy(values: torch.Tensor) -> Floats:
    array: Floats = values.numpy(force=True)
    return array
