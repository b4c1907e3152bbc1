"""The parts of the final score. A part is one number per pair of a caption and an
image.

- ``logit``: the logit of the joint encoder, the score of the EDJE paper.
- ``late``: late interaction, as in ColBERT (Khattab and Zaharia, 2020). For each
  content word of the caption, take the largest cosine similarity with a token of the
  image. The part is the mean over the content words. All word vectors contain their
  mean, which raises every cosine similarity; therefore it is first subtracted from
  words and tokens. The part is meaningful only if the adapter was trained with an
  alignment phase.
- ``pooled``: the cosine similarity of one vector of the image, see `PooledSimilarity`,
  and one vector of the caption.
- ``embedding``: the cosine similarity of the embeddings of both towers.

In shapes, b is the number of pairs, m the tokens per image, d the width of a token, e
the width of an embedding, and k the width of a pooled vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edje_index.errors import ModelError
from edje_index.models.devices import as_tensor
from edje_index.models.joint_inputs import SPECIAL_TOKEN_NAMES, JointTokenizer
from edje_index.models.joint_scorer import JointScorer
from edje_index.scoring.weights import (
    EMBEDDING,
    JOINT_PARTS,
    LATE,
    LOGIT,
    PART_NAMES,
    POOLED,
)

Array = np.ndarray[Any, np.dtype[Any]]
Floats = NDArray[np.float32]

# Common English function words, which name nothing that an image can show.
_STOP_WORD_TEXT = """ a an the this that these those some any each both all one its his
her their them they he she it him who which what there here and or but if while as than
then so not no nor is are was were be been being am has have had having do does did
doing can could will would may might shall should must of to from by with without for at
in on into onto over under up down out off through about against between during before
after above below again very just also other another such own same s t """
_STOP_WORDS = frozenset(_STOP_WORD_TEXT.split())
# the tokens take 13 MB as float32
_LATE_BATCH = 128
# the sum of all parts then fits into a float32 with any weights, see `MAX_WEIGHT`
_MAX_PART = 1e7


def late_interaction(
    captions: Sequence[Sequence[int]],
    tokens: torch.Tensor,
    words: torch.Tensor,
    content: NDArray[np.bool_],
    *,
    mean: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the part ``late`` of b pairs, float32 [b], between -1 and 1. It is 0 for
    a caption without content words.

    Args:
        captions: token ids of the caption of each pair, or of the one caption of all
            pairs.
        tokens: image tokens of each pair [b, m, d].
        words: word vectors of the vocabulary [v, d].
        content: which token ids are content words, bool [v]. See `content_token_mask`.
        mean: mean of `words` [d]. If it is None, the mean is computed.
        scales: `token_scales` of `tokens` and `mean` [b, m]. If it is None, the scales
            are computed.
    """
    content_ids = [
        [token_id for token_id in caption if content[token_id]] for caption in captions
    ]
    lengths = torch.tensor([len(ids) for ids in content_ids])
    is_word = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
    padded_ids = torch.zeros(is_word.shape, dtype=torch.int64)
    padded_ids[is_word] = torch.tensor(
        [token_id for ids in content_ids for token_id in ids], dtype=torch.int64
    )
    mean = words.mean(dim=0) if mean is None else mean
    queries = functional.normalize(words[padded_ids.to(words.device)] - mean, dim=2)
    scales = token_scales(tokens, mean) if scales is None else scales
    # The products with tokens minus mean, without a copy of the tokens minus mean.
    products = queries @ tokens.float().transpose(1, 2) - (queries @ mean)[:, :, None]
    best = (products * scales[:, None]).amax(dim=2)
    is_word = is_word.to(tokens.device)
    return (best * is_word).sum(dim=1) / is_word.sum(dim=1).clamp(min=1)


def token_scales(tokens: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return 1 / the length of each token of `tokens` [b, m, d] minus `mean` [d],
    float32 [b, m].
    """
    return 1 / (tokens.float() - mean).square().sum(dim=2).sqrt().clamp(min=1e-12)


@lru_cache(maxsize=8)
def content_token_mask(tokenizer: JointTokenizer) -> NDArray[np.bool_]:
    """Return which token ids of `tokenizer` are content words, bool [v]. The array is
    read-only and cached.

    Stop words, punctuation and special tokens are not content words.
    """
    mask = np.zeros(len(tokenizer), dtype=bool)
    special_ids = {
        *map(tokenizer.special_id, SPECIAL_TOKEN_NAMES),
        tokenizer.image_token_id,
    }
    for word, token_id in tokenizer.tokenizer.get_vocab().items():
        piece = word.removeprefix("##")
        mask[token_id] = (
            token_id not in special_ids
            and any(map(str.isalnum, piece))
            and word not in _STOP_WORDS
        )
    mask.flags.writeable = False
    return mask


class PooledSimilarity(nn.Module):
    """Linear maps from images and from captions to a common space. In a new object, all
    maps are zero.

    The vector of an image is a linear map of the mean, standard deviation and maximum
    over its tokens. The vector of a caption is a linear map of its bag of words and its
    mean hidden state in the language model. The tensors are buffers:
    `edje_index.training.pooled_similarity` fits them without gradients.

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
            # mean, standard deviation, maximum
            "image": (3 * width, dim),
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
        """The sizes ``words`` (number of words in a bag) and ``dim`` (width of the
        common space).
        """
        return {"words": self.words.shape[0], "dim": self.words.shape[1]}

    def images(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the pooled vectors of images, unit vectors [b, k], from image
        tokens [b, m, d] of any float type.
        """
        return functional.normalize(
            token_statistics(tokens) @ self.image + self.image_offset, dim=1
        )

    def captions(
        self, captions: Sequence[Sequence[int]], sentences: torch.Tensor
    ) -> torch.Tensor:
        """Return the pooled vectors of captions, unit vectors [b, k], from token
        ids and mean hidden states [b, d].
        """
        bags = word_bags(captions, self.word_numbers, self.word_weights)
        return functional.normalize(
            sentences @ self.sentence + bags @ self.words + self.caption_offset, dim=1
        )


def token_statistics(tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean, standard deviation and maximum of the tokens [b, m, d] of
    each image, float32 [b, 3 d].
    """
    tokens = tokens.float()
    mean = tokens.mean(dim=1)
    # several times faster than torch.std on a CPU
    deviation = (tokens - mean[:, None]).square().mean(dim=1).sqrt()
    return torch.cat([mean, deviation, tokens.amax(dim=1)], dim=1)


def word_bags(
    captions: Sequence[Sequence[int]], word_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted bag of words of each caption, float32 [b, w], of length 1, or
    0 without any of the words.

    Args:
        captions: token ids of each caption.
        word_ids: token ids of the w words, ascending [w].
        weights: weight of each word [w].
    """
    bags = torch.zeros(len(captions), len(word_ids), device=word_ids.device)
    if not len(word_ids):
        return bags
    rows = torch.tensor(
        [row for row, caption in enumerate(captions) for _ in caption],
        dtype=torch.int64,
    )
    ids = torch.tensor(
        [token_id for caption in captions for token_id in caption], dtype=torch.int64
    )
    rows = rows.to(word_ids.device)
    ids = ids.to(word_ids.device)
    positions = torch.searchsorted(word_ids, ids).clamp(max=len(word_ids) - 1)
    counted = word_ids[positions] == ids
    bags[rows[counted], positions[counted]] = weights[positions[counted]]
    return functional.normalize(bags, dim=1)


@dataclass
class Pairs:
    """b pairs of a caption and an image. A field may be left out if no computed part
    reads the field.

    Attributes:
        captions: one caption per pair.
        tokens: stored tokens of the images [b, m, d], an array or tensor of any
            floating type.
        similarities: cosine similarity of the caption embedding and the image embedding
            of each pair, float32 [b].
        image_terms: result of `ScoreModels.image_terms` for the images. If it is None,
            a part computes what it needs.
        caption_vectors: result of `ScoreModels.caption_vectors` for the captions,
            likewise.
    """

    captions: Sequence[str] = ()
    tokens: torch.Tensor | Array | None = None
    similarities: Floats | None = None
    image_terms: Floats | None = None
    caption_vectors: torch.Tensor | None = None

    @cached_property
    def token_tensor(self) -> torch.Tensor:
        """The field `tokens` as a tensor."""
        assert self.tokens is not None
        return as_tensor(self.tokens)

    def at(self, mask: NDArray[np.bool_]) -> Pairs:
        """Return the pairs at which `mask` [b] is True."""
        return Pairs(
            captions=[
                caption
                for caption, kept in zip(self.captions, mask, strict=True)
                if kept
            ],
            tokens=(
                None
                if self.tokens is None
                else self.token_tensor[torch.from_numpy(mask)]
            ),
            similarities=None if self.similarities is None else self.similarities[mask],
            image_terms=None if self.image_terms is None else self.image_terms[mask],
            caption_vectors=(
                None
                if self.caption_vectors is None
                else self.caption_vectors[torch.from_numpy(mask)]
            ),
        )


@dataclass(frozen=True)
class ScoreModels:
    """The models that compute the parts of the final score.

    Attributes:
        joint: the joint encoder. Its language model also reads the captions of the
            pooled similarity.
        pooled: the pooled similarity; None if the bundle has no pooled similarity.
    """

    joint: JointScorer
    pooled: PooledSimilarity | None

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts that these models can compute."""
        return tuple(
            name for name in PART_NAMES if name != POOLED or self.pooled is not None
        )

    def part(self, name: str, pairs: Pairs) -> Floats:
        """Compute one part of the final score for b `pairs`, float32 [b]. Higher values
        mean better matches.

        Args:
            name: a name in `part_names`.
            pairs: pairs of a caption and an image.

        Raises:
            ModelError: a value is NaN, or so large that the final score could become
                infinite.
        """
        values = self._part(name, pairs)
        if not (np.abs(values) <= _MAX_PART).all():
            raise ModelError(
                f"the model computes a {PART_NAMES[name]} that is NaN, or beyond"
                f" {_MAX_PART:g}: use another model, and run 'edje-index verify' if the"
                " index may be damaged"
            )
        return values

    @torch.inference_mode()
    def _part(self, name: str, pairs: Pairs) -> Floats:
        # in the EDJE paper, the score is this logit
        if name == LOGIT:
            return _numpy(self.joint.score(pairs.captions, pairs.token_tensor))
        terms = (
            None
            if pairs.image_terms is None
            else torch.from_numpy(pairs.image_terms).to(self.joint.device)
        )
        if name == LATE:
            words = self.joint.word_vectors
            tokenizer = self.joint.tokenizer
            content = content_token_mask(tokenizer)
            mean = self.joint.mean_word_vector
            values = np.zeros(len(pairs.captions), dtype=np.float32)
            scales = None if terms is None else terms[:, -pairs.token_tensor.shape[1] :]
            for start in range(0, len(values), _LATE_BATCH):
                batch = slice(start, start + _LATE_BATCH)
                captions = pairs.captions[batch]
                tokens = pairs.token_tensor[batch].to(words.device)
                ids = tokenizer.caption_ids(
                    captions[:1] if len(set(captions)) == 1 else captions
                )
                its_scales = None if scales is None else scales[batch]
                values[batch] = _numpy(
                    late_interaction(
                        ids, tokens, words, content, mean=mean, scales=its_scales
                    )
                )
            return values
        if name == EMBEDDING:
            assert pairs.similarities is not None
            return pairs.similarities
        caption_vectors = pairs.caption_vectors
        if caption_vectors is None:
            caption_vectors = self.caption_vectors(pairs.captions)
        vectors = self._image_vectors_of(pairs)
        return _numpy((vectors * caption_vectors).sum(dim=1))

    @torch.inference_mode()
    def caption_vectors(self, captions: Sequence[str]) -> torch.Tensor:
        """Return the pooled vectors of `captions`, unit vectors, float32 [b, k], on the
        device of the joint encoder.

        A caption that occurs several times is encoded once. Without a pooled
        similarity, k is 0.
        """
        if self.pooled is None:
            return torch.zeros(len(captions), 0, device=self.joint.device)
        distinct = {
            caption: position
            for position, caption in enumerate(dict.fromkeys(captions))
        }
        texts = list(distinct)
        vectors = []
        for start in range(0, len(texts), self.joint.batch) or [0]:
            batch = texts[start : start + self.joint.batch]
            sentences = self.joint.sentence_vectors(
                self.joint.tokenizer.inputs(batch, 0)
            )
            vectors.append(
                self.pooled.captions(self.joint.tokenizer.caption_ids(batch), sentences)
            )
        return torch.cat(vectors)[
            torch.tensor([distinct[caption] for caption in captions])
        ]

    @torch.inference_mode()
    def image_vectors(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the pooled vectors of images, unit vectors, float32 [b, k], from
        image tokens [b, m, d].
        """
        device = self.joint.device
        if self.pooled is None:
            return torch.zeros(len(tokens), 0, device=device)
        return torch.cat(
            [
                self.pooled.images(batch.to(device))
                for batch in torch.split(tokens, self.joint.batch)
            ]
        )

    @torch.inference_mode()
    def image_terms(self, tokens: torch.Tensor) -> Floats:
        """Return what depends on the image alone, float32 [b, k + m].

        A row contains the pooled vector [k] and the result of `token_scales` [m].
        `tokens` are the stored tokens of the images [b, m, d].
        """
        mean = self.joint.mean_word_vector
        scales = [
            token_scales(batch.to(mean.device), mean)
            for batch in torch.split(tokens, self.joint.batch)
        ]
        return _numpy(torch.cat([self.image_vectors(tokens), torch.cat(scales)], dim=1))

    def _image_vectors_of(self, pairs: Pairs) -> torch.Tensor:
        if pairs.image_terms is None:
            return self.image_vectors(pairs.token_tensor)
        dim = 0 if self.pooled is None else self.pooled.sizes["dim"]
        return torch.from_numpy(pairs.image_terms[:, :dim]).to(self.joint.device)


def reads_tokens(parts: Sequence[str]) -> bool:
    """Return True if a part in `parts` reads image tokens."""
    return bool(set(JOINT_PARTS) & set(parts))


def _numpy(values: torch.Tensor) -> Floats:
    array: Floats = values.numpy(force=True)
    return array
