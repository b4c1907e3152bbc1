"""The parts of the final score. Each computes one number per pair of a caption and an image.

Shape letters: b pairs, m image tokens, d their width, e width of embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.errors import ModelError
from edje_index.models.bf16 import as_tensor
from edje_index.models.joint_scorer import SCORE_BATCH, JointScorer
from edje_index.scoring.hubness import HubnessBank
from edje_index.scoring.late_interaction import late_interaction
from edje_index.scoring.pooled_similarity import PooledSimilarity, PooledVectors
from edje_index.scoring.stop_words import content_token_mask
from edje_index.scoring.weights import EMBEDDING, HUBNESS, LATE, LOGIT, POOLED, TEXT_TO_IMAGE, HubnessSimilarity

Array = np.ndarray[Any, np.dtype[Any]]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Pairs:
    """b pairs of a caption and an image. Values that no part of the score needs may be left out.

    Attributes:
        captions: one caption per pair.
        tokens: stored tokens of the images [b, m, d], an array or a tensor of any floating type.
        similarities: cosine similarities of the embeddings, float32 [b].
        candidate_embeddings: embeddings of the candidates, float32 [b, e]: images in "t2i", captions in "i2t".
    """

    captions: Sequence[str] = ()
    tokens: torch.Tensor | Array | None = None
    similarities: Floats | None = None
    candidate_embeddings: Floats | None = None

    @cached_property
    def token_tensor(self) -> torch.Tensor:
        """The tokens as a tensor."""
        assert self.tokens is not None
        return as_tensor(self.tokens)


class Part(Protocol):
    """One part of the final score."""

    def of(self, pairs: Pairs) -> Floats:
        """The part's value for each of `pairs`, float32 [b]; higher means a better match."""
        ...


@dataclass(frozen=True)
class Logit:
    """The joint encoder's matching logit: the published score."""

    joint: JointScorer

    def of(self, pairs: Pairs) -> Floats:
        return _numpy(self.joint.score(pairs.captions, pairs.token_tensor))


@dataclass(frozen=True)
class LateInteraction:
    """Similarity of each content word of the caption with its nearest image token, see `late_interaction`."""

    joint: JointScorer

    @torch.inference_mode()
    def of(self, pairs: Pairs) -> Floats:
        words, tokenizer = self.joint.word_vectors, self.joint.tokenizer
        content = content_token_mask(tokenizer)

        def score(captions: Sequence[str], tokens: torch.Tensor) -> torch.Tensor:
            return late_interaction(tokenizer.caption_ids(captions), tokens.to(words.device), words, content)

        return _in_batches(pairs, score)


@dataclass(frozen=True)
class Pooled:
    """Cosine similarity of the whole caption with all tokens together, see `pooled_similarity`."""

    vectors: PooledVectors

    @torch.inference_mode()
    def of(self, pairs: Pairs) -> Floats:
        return _in_batches(
            pairs,
            lambda captions, tokens: (self.vectors.of_captions(captions) * self.vectors.of_images(tokens)).sum(dim=1),
        )


@dataclass(frozen=True)
class Embedding:
    """Cosine similarity of the embeddings, which the search for candidates has computed already."""

    def of(self, pairs: Pairs) -> Floats:
        assert pairs.similarities is not None
        return pairs.similarities


@dataclass(frozen=True)
class Hubness:
    """The hubness correction, see `hubness`: minus the hubness of each candidate, whatever the query."""

    bank: HubnessBank
    vectors: PooledVectors
    similarity: HubnessSimilarity
    direction: str

    @torch.inference_mode()
    def of(self, pairs: Pairs) -> Floats:
        assert pairs.candidate_embeddings is not None
        images = self.direction == TEXT_TO_IMAGE
        vectors = self.vectors.of_images(pairs.token_tensor) if images else self.vectors.of_captions(pairs.captions)
        embeddings = torch.from_numpy(pairs.candidate_embeddings).to(vectors.device)
        return -_numpy(self.bank.hubness(embeddings, vectors, self.similarity, self.direction))


@dataclass(frozen=True)
class ScoreModels:
    """The models that the parts read.

    Attributes:
        joint: the joint encoder.
        pooled: the pooled similarity; None if the bundle has none.
        bank: the bank of the hubness correction; None if the bundle has none.
    """

    joint: JointScorer
    pooled: PooledSimilarity | None
    bank: HubnessBank | None

    def parts(self, direction: str, similarity: HubnessSimilarity) -> dict[str, Part]:
        """Every part that these models have, by name.

        Args:
            direction: "t2i" or "i2t".
            similarity: what the hubness correction is computed from.
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
    """Raise ModelError unless the hubness bank has vectors of the pooled similarity."""
    if models.bank is None:
        return
    bank_dim, dim = models.bank.sizes["dim"], 0 if models.pooled is None else models.pooled.sizes["dim"]
    if bank_dim != dim:
        raise ModelError(
            f"the hubness bank has pooled vectors of width {bank_dim}, but the pooled similarity has width {dim}: "
            "take both from the same training run"
        )


def reads_tokens(parts: Sequence[str], direction: str) -> bool:
    """Whether any of `parts` reads the stored tokens of images."""
    return bool({LOGIT, LATE, POOLED} & set(parts)) or (HUBNESS in parts and direction == TEXT_TO_IMAGE)


def _in_batches(pairs: Pairs, score: Callable[[Sequence[str], torch.Tensor], torch.Tensor]) -> Floats:
    """Apply `score` to `SCORE_BATCH` pairs at a time, which bounds memory."""
    values = np.zeros(len(pairs.captions), dtype=np.float32)
    for start in range(0, len(values), SCORE_BATCH):
        batch = slice(start, start + SCORE_BATCH)
        values[batch] = _numpy(score(pairs.captions[batch], pairs.token_tensor[batch]))
    return values


def _numpy(values: torch.Tensor) -> Floats:
    array: Floats = values.numpy(force=True)
    return array
