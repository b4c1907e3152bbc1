"""The parts of the final score. A part is one number per pair of a caption and an
image.

- ``logit``: the logit of the joint encoder, the score of the EDJE paper.
- ``late``: late interaction, as in ColBERT (Khattab and Zaharia, 2020). For each
  content word of the caption, take the largest cosine similarity with a token of the
  image. The part is the mean of these similarities over the content words. The word
  vectors have a large common component, which raises every cosine similarity.
  Therefore the mean of all word vectors is first subtracted from words and tokens. The
  part is meaningful only if the adapter was trained with an alignment phase.
- ``pooled``: the cosine similarity of one vector for the image and one vector for the
  caption, see `PooledSimilarity`.
- ``embedding``: the cosine similarity of the embedding of the image (vision tower) and
  the embedding of the caption (text tower).

In array shapes, b is the number of pairs, m the number of tokens per image, d the width
of a token, and k the width of a pooled vector.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from edje_index.errors import ModelError
from edje_index.models.devices import as_tensor, inference
from edje_index.models.joint_inputs import SPECIAL_TOKEN_NAMES, JointTokenizer
from edje_index.models.joint_scorer import JointScorer
from edje_index.scoring.weights import (
    JOINT_PARTS,
    LATE,
    LOGIT,
    PART_NAMES,
    POOLED,
)
from storage_formats.arrays import Array, Bools, Floats, Ints

# Common English function words. They name nothing that an image can show, so late
# interaction ignores them.
_STOP_WORD_TEXT = """ a an the this that these those some any each both all one its his
her their them they he she it him who which what there here and or but if while as than
then so not no nor is are was were be been being am has have had having do does did
doing can could will would may might shall should must of to from by with without for at
in on into onto over under up down out off through about against between during before
after above below again very just also other another such own same s t """
_STOP_WORDS = frozenset(_STOP_WORD_TEXT.split())
# Number of pairs in a batch of late interaction, unless the batch of the joint encoder
# is larger. For blocks of 64 x 384, the tokens of 128 pairs take 13 MB as float32.
_LATE_BATCH = 128
# Largest absolute value of a part. With any weights up to `MAX_WEIGHT`, the sum of all
# parts is then below the largest float32.
_MAX_PART = 1e7


def late_interaction(
    captions: Sequence[Sequence[int]],
    tokens: torch.Tensor,
    words: torch.Tensor,
    content: Bools,
    *,
    mean: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the part ``late`` of b pairs, float32 [b], between -1 and 1:

        mean over content words w of max over tokens t of cos(w - mean, t - mean)

    The value is 0 for a caption without content words.

    Args:
        captions: token ids of the caption of each pair. If all pairs have the same
            caption, it may be given once.
        tokens: image tokens of each pair [b, m, d].
        words: word vectors of the vocabulary of v token ids [v, d].
        content: which token ids are content words, bool [v]. See `content_token_mask`.
        mean: vector that is subtracted from words and tokens [d].
        scales: result of `token_scales` for `tokens` and `mean` [b, m]. None computes
            the scales.
    """
    content_ids = [
        torch.tensor([token_id for token_id in caption if content[token_id]]).long()
        for caption in captions
    ]
    lengths = torch.tensor([len(ids) for ids in content_ids])
    padded_ids = nn.utils.rnn.pad_sequence(content_ids, batch_first=True)
    is_word = torch.arange(padded_ids.shape[1]) < lengths[:, None]
    queries = functional.normalize(words[padded_ids.to(words.device)] - mean, dim=2)
    scales = token_scales(tokens, mean) if scales is None else scales
    # This equals queries @ (tokens - mean), but does not allocate tokens - mean.
    products = queries @ tokens.float().transpose(1, 2) - (queries @ mean)[:, :, None]
    best = (products * scales[:, None]).amax(dim=2)
    is_word = is_word.to(tokens.device)
    return (best * is_word).sum(dim=1) / is_word.sum(dim=1).clamp(min=1)


def token_scales(tokens: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return 1 / ||t - mean|| for each token t of `tokens` [b, m, d], float32 [b, m].
    The shape of `mean` is [d].
    """
    return 1 / (tokens.float() - mean).square().sum(dim=2).sqrt().clamp(min=1e-12)


@lru_cache(maxsize=8)
def content_token_mask(tokenizer: JointTokenizer) -> Bools:
    """Return which of the v token ids of `tokenizer` are content words, bool [v]. The
    array is read-only and cached.

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
    """Linear maps of images and of captions to a common space, in which the cosine
    similarity of an image and a caption is computed. In a new object, all maps are
    zero.

    The vector of an image is a linear map of the mean, standard deviation and maximum
    over its tokens. The vector of a caption is a linear map of its bag of words and its
    mean hidden state in the language model. The tensors are buffers, not parameters,
    because `edje_index.training.pooled_similarity` fits them without gradients.

    Args:
        width: width d of image tokens and hidden states.
        words: number w of words that a bag of words counts.
        dim: width k of the common space.

    Attributes:
        image: map of the token statistics [3 d, k].
        image_offset: offset of image vectors [k].
        sentence: map of mean hidden states [d, k].
        word_numbers: token ids of the w words, ascending, int64 [w].
        word_weights: weight of each of the w words in a bag of words [w].
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
            # `token_statistics` returns 3 values per element of a token.
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
        """Return the pooled vectors of images, which are unit vectors [b, k].

        Args:
            tokens: image tokens [b, m, d] of any floating type.
        """
        return functional.normalize(
            token_statistics(tokens) @ self.image + self.image_offset, dim=1
        )

    def captions(
        self, captions: Sequence[Sequence[int]], sentences: torch.Tensor
    ) -> torch.Tensor:
        """Return the pooled vectors of captions, which are unit vectors [b, k].

        Args:
            captions: token ids of each caption.
            sentences: mean hidden state of each caption [b, d].
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
    # On a CPU, this is several times faster than `torch.std`.
    deviation = (tokens - mean[:, None]).square().mean(dim=1).sqrt()
    return torch.cat([mean, deviation, tokens.amax(dim=1)], dim=1)


def word_bags(
    captions: Sequence[Sequence[int]], word_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted bag of words of each caption, float32 [b, w]. A bag is a unit
    vector, or the zero vector if the caption contains none of the w words. A word that
    occurs several times counts once.

    Args:
        captions: token ids of each caption.
        word_ids: token ids of the w words, ascending [w].
        weights: weight of each word [w].
    """
    contained = [
        torch.isin(word_ids, torch.tensor(caption).to(word_ids)) for caption in captions
    ]
    bags = torch.stack(contained) * weights
    return functional.normalize(bags, dim=1)


@dataclass(frozen=True)
class Images:
    """Values of b images. The parts of the final score are computed from these values
    and the captions. `Scorer.images` creates this object.

    Attributes:
        tokens: stored tokens of the images [b, m, d], of any floating type.
        pooled: pooled vectors, which are unit vectors, float32 [b, k]. If the bundle
            has no pooled similarity, k is 0.
        token_scales: result of `token_scales` for `tokens`, float32 [b, m].
    """

    tokens: torch.Tensor
    pooled: torch.Tensor
    token_scales: torch.Tensor

    def at(self, positions: torch.Tensor) -> Images:
        """Return the images at `positions`, int64 [n]. A position may occur several
        times.
        """
        return Images(
            self.tokens[positions], self.pooled[positions], self.token_scales[positions]
        )


@dataclass(frozen=True)
class Scorer:
    """Computes the parts of the final score that depend on the caption and on the
    stored tokens together. The other part, the cosine similarity of the embeddings,
    needs no model.

    Attributes:
        joint: the joint encoder. Its language model also encodes the captions for the
            pooled similarity.
        pooled: the pooled similarity; None if the bundle has no pooled similarity.
    """

    joint: JointScorer
    pooled: PooledSimilarity | None

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts that a final score can have with these models."""
        return tuple(
            name for name in PART_NAMES if name != POOLED or self.pooled is not None
        )

    @property
    def pooled_dim(self) -> int:
        """Width k of the pooled vectors; 0 if the bundle has no pooled similarity."""
        return 0 if self.pooled is None else self.pooled.sizes["dim"]

    @inference()
    def images(self, tokens: torch.Tensor | Array) -> Images:
        """Return the `Images` with the stored tokens `tokens` [b, m, d]. The pooled
        vectors and the token scales are on the device of the joint encoder; the tokens
        stay on their device.
        """
        tokens = as_tensor(tokens)
        pooled = []
        scales = []
        for batch in torch.split(tokens, self.joint.batch):
            batch = batch.to(self.joint.device)
            scales.append(token_scales(batch, self.joint.mean_word_vector))
            pooled.append(
                batch.new_zeros(len(batch), 0, dtype=torch.float32)
                if self.pooled is None
                else self.pooled.images(batch)
            )
        return Images(tokens, torch.cat(pooled), torch.cat(scales))

    def parts(
        self, names: Iterable[str], captions: Sequence[str], images: Images
    ) -> dict[str, Floats]:
        """Compute parts of b pairs, float32 [b] each, by name. Higher values mean
        better matches.

        Args:
            names: names of the parts. Each is in `JOINT_PARTS` and in `part_names`.
            captions: the caption of each pair.
            images: the image of each pair.

        Raises:
            ModelError: a value is NaN, or so large that the final score could become
                infinite.
        """
        compute = {
            # the score of the EDJE paper
            LOGIT: lambda captions, images: self.joint.score(captions, images.tokens),
            LATE: self._late_interactions,
            POOLED: self._pooled_similarities,
        }
        values = {}
        for name in names:
            values[name] = compute[name](captions, images).numpy(force=True)
            if not (np.abs(values[name]) <= _MAX_PART).all():
                raise ModelError(
                    f"the model computes a {PART_NAMES[name]} that is NaN, or beyond"
                    f" {_MAX_PART:g}: use another model, and verify the index if it may"
                    " be damaged"
                )
        return values

    @inference()
    def _late_interactions(
        self, captions: Sequence[str], images: Images
    ) -> torch.Tensor:
        """Return the late interaction of each caption with its image."""
        words = self.joint.word_vectors
        content = content_token_mask(self.joint.tokenizer)
        ids = self.joint.tokenizer.caption_ids(captions)
        size = max(_LATE_BATCH, self.joint.batch)
        values = []
        for start in range(0, len(captions), size):
            batch = slice(start, start + size)
            its_ids = ids[batch]
            # If all captions of the batch are equal, one copy is passed on, so that the
            # vectors of its words are computed once.
            if len(set(captions[batch])) == 1:
                its_ids = its_ids[:1]
            values.append(
                late_interaction(
                    its_ids,
                    images.tokens[batch].to(words.device),
                    words,
                    content,
                    mean=self.joint.mean_word_vector,
                    scales=images.token_scales[batch].to(words.device),
                )
            )
        return torch.cat(values)

    @inference()
    def _pooled_similarities(
        self, captions: Sequence[str], images: Images
    ) -> torch.Tensor:
        """Return the inner product of the pooled vectors of each caption and its image.
        The vectors have length 1, so this is their cosine similarity.

        A caption that occurs several times is encoded once.
        """
        assert self.pooled is not None
        # An array of texts would take the memory of the longest for each.
        distinct = sorted(set(captions))
        positions = {caption: number for number, caption in enumerate(distinct)}
        tokenizer = self.joint.tokenizer
        vectors = []
        for start in range(0, len(distinct), self.joint.batch):
            batch = distinct[start : start + self.joint.batch]
            sentences = self.joint.sentence_vectors(tokenizer.inputs(batch, 0))
            vectors.append(
                self.pooled.captions(tokenizer.caption_ids(batch), sentences)
            )
        of_captions = torch.cat(vectors)[[positions[each] for each in captions]]
        return (images.pooled.to(of_captions.device) * of_captions).sum(dim=1)


def reads_tokens(parts: Iterable[str]) -> bool:
    """Return True if a part in `parts` reads image tokens."""
    return not set(JOINT_PARTS).isdisjoint(parts)


# Number of slots. With the shipped model, they take at most 48 MB. The operating system
# allocates the memory of a slot when the slot is first used.
_SLOTS = 1 << 15


class ImageCache:
    """Keeps the pooled vectors and token scales of images by row id. Thread-safe.

    The slot of a row is its row id modulo the number of slots, so a look-up of 100 rows
    takes microseconds. A slot has the values of one row. If two rows have the same
    slot, the row that was stored last replaces the other.

    Args:
        scorer: computes the values of images that are not in the cache.
        num_tokens: number of tokens per image, m.
    """

    def __init__(self, scorer: Scorer, num_tokens: int) -> None:
        self._scorer = scorer
        self._lock = threading.Lock()
        self._rows = np.full(_SLOTS, -1, dtype=np.int64)
        self._pooled = np.empty((_SLOTS, scorer.pooled_dim), dtype=np.float32)
        self._token_scales = np.empty((_SLOTS, num_tokens), dtype=np.float32)

    def images(self, rows: Ints, tokens: torch.Tensor) -> Images:
        """Return the images `rows` [b], whose tokens are `tokens` [b, m, d]."""
        slots = rows % _SLOTS
        with self._lock:
            missing = self._rows[slots] != rows
            pooled = self._pooled[slots]
            token_scales = self._token_scales[slots]
        if missing.any():
            computed = self._scorer.images(tokens[torch.from_numpy(missing)])
            pooled[missing] = computed.pooled.numpy(force=True)
            token_scales[missing] = computed.token_scales.numpy(force=True)
            with self._lock:
                self._rows[slots] = rows
                self._pooled[slots] = pooled
                self._token_scales[slots] = token_scales
        return Images(tokens, torch.from_numpy(pooled), torch.from_numpy(token_scales))
