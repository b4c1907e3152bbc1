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
- ``hubness``: minus the hubness of the candidate (query-bank normalisation: Bogolin et
  al., CVPR 2022; Smith et al., ICLR 2017). It lowers the scores of candidates that are
  similar to many queries. The hubness of an image is

      t log mean_j exp((w <e, e_j> + u <p, p_j>) / t)

  where e is the embedding and p the pooled vector of the image, and e_j is the
  embedding and p_j the pooled vector of caption j in the `HubnessBank`.
  `HubnessSimilarity` has the weights w and u and the temperature t. The hubness of a
  caption is computed in the same way from the images in the bank. It has a lower limit:
  the 10 % quantile of the hubness in the bank. Without it, images that are unlike all
  training images would rank first for every caption.

In shapes, b is the number of pairs, m the tokens per image, d the width of a token, e
the width of an embedding, and k the width of a pooled vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    HUBNESS,
    LATE,
    LOGIT,
    PART_NAMES,
    POOLED,
    TEXT_TO_IMAGE,
    HubnessSimilarity,
    ScoreWeights,
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
_LARGEST_CODE = 127
# candidates per step; small, so that memory for their products with the bank is reused
_CHUNK = 256
# the tokens take 13 MB as float32
_LATE_BATCH = 128
_FLOOR_QUANTILE = 0.1
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


def hubness(
    embedding_products: torch.Tensor,
    pooled_products: torch.Tensor,
    *,
    embedding: Any,
    pooled: Any,
    temperature: Any,
) -> torch.Tensor:
    """Compute the hubness of n candidates [n], without the lower limit. The result is
    differentiable.

    Args:
        embedding_products: inner products of candidate embeddings and bank embeddings
            [n, b].
        pooled_products: inner products of candidate pooled vectors and bank pooled
            vectors. The shape is [n, b] or broadcasts to [n, b].
        embedding, pooled, temperature: numbers or scalar tensors; see
        `HubnessSimilarity`.
    """
    similarities = (
        embedding * embedding_products + pooled * pooled_products
    ) / temperature
    values: torch.Tensor = temperature * (
        torch.logsumexp(similarities, dim=1) - math.log(similarities.shape[1])
    )
    return values


class HubnessBank(nn.Module):
    """Embeddings and pooled vectors of training captions and training images, as int8
    codes with one scale per vector.

    Args:
        captions: number of captions.
        images: number of images.
        embed_dim: width of the embeddings.
        dim: width of the pooled vectors; 0 if the model has no pooled similarity.
    """

    def __init__(self, captions: int, images: int, embed_dim: int, dim: int) -> None:
        super().__init__()
        self.caption_embeddings = _Int8Rows(captions, embed_dim)
        self.caption_vectors = _Int8Rows(captions, dim)
        self.image_embeddings = _Int8Rows(images, embed_dim)
        self.image_vectors = _Int8Rows(images, dim)
        self._floors: dict[tuple[HubnessSimilarity, str], float] = {}

    @classmethod
    def of(
        cls,
        captions: tuple[torch.Tensor, torch.Tensor],
        images: tuple[torch.Tensor, torch.Tensor],
    ) -> HubnessBank:
        """Make a bank of the (embeddings [b, e], pooled vectors [b, k]) of
        captions, and of images with another b.
        """
        bank = cls(
            len(captions[0]), len(images[0]), captions[0].shape[1], captions[1].shape[1]
        )
        rows = (
            bank.caption_embeddings,
            bank.caption_vectors,
            bank.image_embeddings,
            bank.image_vectors,
        )
        for part, values in zip(rows, (*captions, *images), strict=True):
            part.fill(values)
        return bank

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of ``captions`` and ``images``, and the width ``dim`` of the
        pooled vectors.
        """
        captions, dim = self.caption_vectors.codes.shape
        return {
            "captions": captions,
            "images": len(self.image_embeddings.codes),
            "dim": dim,
        }

    def hubness(
        self,
        embeddings: torch.Tensor,
        vectors: torch.Tensor,
        similarity: HubnessSimilarity,
        direction: str,
    ) -> torch.Tensor:
        """Compute the hubness of n candidates [n] from their embeddings [n, e] and
        pooled vectors [n, k].

        In direction "t2i", candidates are images. In "i2t", they are captions.
        """
        values = self._values(embeddings, vectors, similarity, direction)
        return values.clamp(min=self.floor(similarity, direction))

    def floor(self, similarity: HubnessSimilarity, direction: str) -> float:
        """Return the lower limit of the hubness."""
        if (similarity, direction) not in self._floors:
            images = direction == TEXT_TO_IMAGE
            embeddings = self.image_embeddings if images else self.caption_embeddings
            vectors = self.image_vectors if images else self.caption_vectors
            values = self._values(
                embeddings.dense(), vectors.dense(), similarity, direction
            )
            self._floors[similarity, direction] = float(
                values.quantile(_FLOOR_QUANTILE)
            )
        return self._floors[similarity, direction]

    def _values(
        self,
        embeddings: torch.Tensor,
        vectors: torch.Tensor,
        similarity: HubnessSimilarity,
        direction: str,
    ) -> torch.Tensor:
        chunks = zip(
            torch.split(embeddings, _CHUNK), torch.split(vectors, _CHUNK), strict=True
        )
        return torch.cat(
            [
                hubness(*self.products(*chunk, direction), **asdict(similarity))
                for chunk in chunks
            ]
        )

    def products(
        self, embeddings: torch.Tensor, vectors: torch.Tensor, direction: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inner products of n candidates and the bank, of embeddings [n, b] and
        of pooled vectors [n, b].

        In direction "t2i", image candidates are compared with the captions in the bank.
        In "i2t", caption candidates are compared with the images in the bank. Without
        pooled similarity, the second result is zeros [1, 1].
        """
        captions = direction == TEXT_TO_IMAGE
        bank_embeddings = self.caption_embeddings if captions else self.image_embeddings
        bank_vectors = self.caption_vectors if captions else self.image_vectors
        pooled = (
            vectors @ bank_vectors.dense().T
            if vectors.shape[1]
            else vectors.new_zeros(1, 1)
        )
        return embeddings @ bank_embeddings.dense().T, pooled


class _Int8Rows(nn.Module):
    """Vectors [n, k], stored as int8 codes and one float32 scale per vector."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(count, width, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(count))

    def fill(self, values: torch.Tensor) -> None:
        """Round `values` [n, k] to int8 codes, and store them."""
        if values.shape[1]:
            self.scales = values.float().abs().amax(dim=1) / _LARGEST_CODE
            self.codes = (
                (values / self.scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)
            )

    def dense(self) -> torch.Tensor:
        return self.codes * self.scales[:, None]


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
        candidate_embeddings: image embeddings in direction "t2i", caption embeddings in
            "i2t", float32 [b, e].
        image_terms: result of `ScoreModels.image_terms` for the images. If it is None,
            a part computes what it needs.
        caption_vectors: result of `ScoreModels.caption_vectors` for the captions,
            likewise.
    """

    captions: Sequence[str] = ()
    tokens: torch.Tensor | Array | None = None
    similarities: Floats | None = None
    candidate_embeddings: Floats | None = None
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
            candidate_embeddings=(
                None
                if self.candidate_embeddings is None
                else self.candidate_embeddings[mask]
            ),
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
        bank: the hubness bank; None if the bundle has no hubness bank.
    """

    joint: JointScorer
    pooled: PooledSimilarity | None
    bank: HubnessBank | None

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts that these models can compute."""
        missing = {POOLED: self.pooled is None, HUBNESS: self.bank is None}
        return tuple(
            name
            for name in (LOGIT, LATE, POOLED, EMBEDDING, HUBNESS)
            if not missing.get(name)
        )

    def part(
        self, name: str, pairs: Pairs, direction: str, weights: ScoreWeights
    ) -> Floats:
        """Compute one part of the final score for b `pairs`, float32 [b]. Higher values
        mean better matches.

        Args:
            name: a name in `part_names`.
            pairs: pairs of a caption and an image.
            direction: "t2i" or "i2t".
            weights: the hubness correction uses `weights.hubness_similarity`.

        Raises:
            ModelError: a value is NaN, or so large that the final score could become
                infinite.
        """
        values = self._part(name, pairs, direction, weights)
        if not (np.abs(values) <= _MAX_PART).all():
            raise ModelError(
                f"the model computes a {PART_NAMES[name]} that is NaN, or beyond"
                f" {_MAX_PART:g}: use another model, and run 'edje-index verify' if the"
                " index may be damaged"
            )
        return values

    @torch.inference_mode()
    def _part(
        self, name: str, pairs: Pairs, direction: str, weights: ScoreWeights
    ) -> Floats:
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
            scales = (
                None
                if terms is None
                else terms[:, -1 - pairs.token_tensor.shape[1] : -1]
            )
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
        images = direction == TEXT_TO_IMAGE
        if name == HUBNESS and images and terms is not None:
            return -_numpy(terms[:, -1])
        reads_images = name == POOLED or images
        caption_vectors = pairs.caption_vectors
        if caption_vectors is None and (name == POOLED or not images):
            caption_vectors = self.caption_vectors(pairs.captions)
        vectors = self._image_vectors_of(pairs) if reads_images else caption_vectors
        assert vectors is not None
        if name == POOLED:
            assert caption_vectors is not None
            return _numpy((vectors * caption_vectors).sum(dim=1))
        assert self.bank is not None
        assert pairs.candidate_embeddings is not None
        embeddings = torch.from_numpy(pairs.candidate_embeddings).to(vectors.device)
        return -_numpy(
            self.bank.hubness(
                embeddings, vectors, weights.hubness_similarity, direction
            )
        )

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
    def image_terms(
        self, tokens: torch.Tensor, embeddings: Floats | None, weights: ScoreWeights
    ) -> Floats:
        """Return what depends on the image alone, float32 [b, k + m + 1], for direction
        "t2i".

        A row contains the pooled vector [k], the result of `token_scales` [m], and the
        hubness of the image.

        Args:
            tokens: stored tokens of the images [b, m, d].
            embeddings: embeddings of the images [b, e]. If it is None, the hubness is
                0.
            weights: as for `part`.
        """
        mean = self.joint.mean_word_vector
        hubness = torch.zeros(len(tokens), device=self.joint.device)
        scales = [
            token_scales(batch.to(mean.device), mean)
            for batch in torch.split(tokens, self.joint.batch)
        ]
        vectors = self.image_vectors(tokens)
        if embeddings is not None and self.bank is not None:
            similarity = weights.hubness_similarity
            hubness = self.bank.hubness(
                torch.from_numpy(embeddings).to(vectors.device),
                vectors,
                similarity,
                TEXT_TO_IMAGE,
            )
        return _numpy(torch.cat([vectors, torch.cat(scales), hubness[:, None]], dim=1))

    def _image_vectors_of(self, pairs: Pairs) -> torch.Tensor:
        if pairs.image_terms is None:
            return self.image_vectors(pairs.token_tensor)
        dim = 0 if self.pooled is None else self.pooled.sizes["dim"]
        return torch.from_numpy(pairs.image_terms[:, :dim]).to(self.joint.device)


def reads_tokens(parts: Sequence[str], direction: str) -> bool:
    """Return True if a part in `parts` reads image tokens in `direction`."""
    return bool({LOGIT, LATE, POOLED} & set(parts)) or (
        HUBNESS in parts and direction == TEXT_TO_IMAGE
    )


def _numpy(values: torch.Tensor) -> Floats:
    array: Floats = values.numpy(force=True)
    return array
