"""The parts of the final score. A part is one number per pair of a caption and an image.

In shapes, b is the number of pairs, m the tokens per image, d the width of a token, e the width of an embedding, and k
the width of a pooled vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.models.devices import as_tensor
from edje_index.models.joint_scorer import JointScorer
from edje_index.scoring.hubness import HubnessBank
from edje_index.scoring.late_interaction import content_token_mask, late_interaction
from edje_index.scoring.pooled_similarity import PooledSimilarity
from edje_index.scoring.weights import EMBEDDING, HUBNESS, LATE, LOGIT, POOLED, TEXT_TO_IMAGE, ScoreWeights

Array = np.ndarray[Any, np.dtype[Any]]
Floats = NDArray[np.float32]


@dataclass
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
    _image_vectors: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @cached_property
    def token_tensor(self) -> torch.Tensor:
        """The field `tokens` as a tensor."""
        assert self.tokens is not None
        return as_tensor(self.tokens)

    def at(self, mask: NDArray[np.bool_]) -> Pairs:
        """Return the pairs at which `mask` [b] is True."""
        return Pairs(
            captions=[caption for caption, kept in zip(self.captions, mask, strict=True) if kept],
            tokens=None if self.tokens is None else self.token_tensor[torch.from_numpy(mask)],
            similarities=None if self.similarities is None else self.similarities[mask],
            candidate_embeddings=None if self.candidate_embeddings is None else self.candidate_embeddings[mask],
        )


@dataclass(frozen=True)
class ScoreModels:
    """The models that compute the parts of the final score.

    Attributes:
        joint: the joint encoder. Its language model also reads the captions of the pooled similarity.
        pooled: the pooled similarity; None if the bundle has no pooled similarity.
        bank: the hubness bank; None if the bundle has no hubness bank.
    """

    joint: JointScorer
    pooled: PooledSimilarity | None
    bank: HubnessBank | None

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts that these models can compute."""
        missing = {POOLED: self.pooled is None, HUBNESS: self.bank is None}
        return tuple(name for name in (LOGIT, LATE, POOLED, EMBEDDING, HUBNESS) if not missing.get(name))

    @torch.inference_mode()
    def part(self, name: str, pairs: Pairs, direction: str, weights: ScoreWeights) -> Floats:
        """Compute one part of the final score for b `pairs`, float32 [b]. Higher values mean better matches.

        Args:
            name: a name in `part_names`.
            pairs: pairs of a caption and an image.
            direction: "t2i" or "i2t".
            weights: the hubness correction uses `weights.hubness_similarity`.
        """
        if name == LOGIT:  # in the EDJE paper, the score is this logit
            return _numpy(self.joint.score(pairs.captions, pairs.token_tensor))
        if name == LATE:
            return self._late_interaction(pairs)
        if name == POOLED:
            return _numpy((self.caption_vectors(pairs.captions) * self._image_vectors_of(pairs)).sum(dim=1))
        if name == EMBEDDING:
            assert pairs.similarities is not None
            return pairs.similarities
        assert self.bank is not None
        assert pairs.candidate_embeddings is not None
        images = direction == TEXT_TO_IMAGE
        vectors = self._image_vectors_of(pairs) if images else self.caption_vectors(pairs.captions)
        embeddings = torch.from_numpy(pairs.candidate_embeddings).to(vectors.device)
        return -_numpy(self.bank.hubness(embeddings, vectors, weights.hubness_similarity, direction))

    @torch.inference_mode()
    def caption_vectors(self, captions: Sequence[str]) -> torch.Tensor:
        """Return the pooled vectors of `captions`, unit vectors, float32 [b, k], on the device of the joint encoder.

        A caption that occurs several times is encoded once. Without a pooled similarity, k is 0.
        """
        if self.pooled is None:
            return torch.zeros(len(captions), 0, device=self.joint.device)
        distinct = {caption: position for position, caption in enumerate(dict.fromkeys(captions))}
        texts, vectors = list(distinct), []
        for start in range(0, len(texts), self.joint.batch) or [0]:
            batch = texts[start : start + self.joint.batch]
            sentences = self.joint.sentence_vectors(self.joint.tokenizer.inputs(batch, 0))
            vectors.append(self.pooled.captions(self.joint.tokenizer.caption_ids(batch), sentences))
        return torch.cat(vectors)[torch.tensor([distinct[caption] for caption in captions])]

    @torch.inference_mode()
    def image_vectors(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the pooled vectors of images, unit vectors, float32 [b, k], from image tokens [b, m, d]."""
        device = self.joint.device
        if self.pooled is None:
            return torch.zeros(len(tokens), 0, device=device)
        return torch.cat([self.pooled.images(batch.to(device)) for batch in torch.split(tokens, self.joint.batch)])

    def _image_vectors_of(self, pairs: Pairs) -> torch.Tensor:
        """Return the pooled vectors of the images of `pairs`. They are computed once, for all parts."""
        if pairs._image_vectors is None:
            pairs._image_vectors = self.image_vectors(pairs.token_tensor)
        return pairs._image_vectors

    def _late_interaction(self, pairs: Pairs) -> Floats:
        words, tokenizer = self.joint.word_vectors, self.joint.tokenizer
        content, mean = content_token_mask(tokenizer), self.joint.mean_word_vector
        values = np.zeros(len(pairs.captions), dtype=np.float32)
        for start in range(0, len(values), self.joint.batch):
            batch = slice(start, start + self.joint.batch)
            ids, tokens = tokenizer.caption_ids(pairs.captions[batch]), pairs.token_tensor[batch].to(words.device)
            values[batch] = _numpy(late_interaction(ids, tokens, words, content, mean=mean))
        return values


def reads_tokens(parts: Sequence[str], direction: str) -> bool:
    """Return True if a part in `parts` reads image tokens in `direction`."""
    return bool({LOGIT, LATE, POOLED} & set(parts)) or (HUBNESS in parts and direction == TEXT_TO_IMAGE)


def _numpy(values: torch.Tensor) -> Floats:
    array: Floats = values.numpy(force=True)
    return array
