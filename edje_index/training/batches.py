"""Makes the batches of the alignment phase and the joint phase from the data set.
Batches are made on the CPU.

A batch is divided among all workers, and each worker makes only its own part. This part
depends only on the data, the settings, the batch number, the rank of the worker and the
number of workers. Workers therefore make their parts without communicating.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edje_index.models.joint_inputs import (
    SPECIAL_TOKEN_NAMES,
    JointInputs,
    JointTokenizer,
)
from edje_index.training.config import TrainSettings
from edje_index.training.dataset import TrainingData
from edje_index.training.workers import ALONE, WorkerGroup
from storage_formats.arrays import Bools, Ints
from storage_formats.errors import UsageError

TokenIds = list[int]
# Purposes of random numbers, see `stream`.
ORDER, MASKING, DROPOUT, CLUSTERING = range(4)
POOLING = 6
# Number of buckets of input rows, see `InputRows`. With more buckets, rows have less
# padding, but matrix products are smaller and less efficient.
_BUCKETS = 4
# The joint encoder computes each bucket in a separate pass. On a GPU, many passes are
# slow, because the GPU waits while the CPU starts each operation: a step with 20 passes
# took 0.9 s, a step with 2 passes 0.31 s, and a step with 1 pass 0.25 s.
_BUCKETS_ON_GPU = 1
# Smallest number of input rows per bucket. If there are too few rows for this number,
# fewer buckets are made.
_BUCKET_ROWS = 24


def stream(seed: int, purpose: int, *position: int) -> np.random.Generator:
    """Return a random number generator that depends only on the arguments. The numbers
    of a purpose do not depend on how many numbers other purposes draw.

    `purpose` is a constant of this module, such as `MASKING`. `position` are numbers
    that select one generator of this purpose, for example a batch number and a rank.
    """
    return np.random.default_rng([seed, purpose, *position])


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> Ints:
    return stream(seed, ORDER, epoch).permutation(count)


def hard_negatives(
    similarities: NDArray[np.floating[Any]], masked: Bools, count: int
) -> Ints:
    """Return the indices of the `count` candidates that are most similar to each of r
    queries, in order of decreasing similarity, int64 [r, count].

    Masked candidates are left out. If candidates are equally similar, the candidate
    with the lowest index comes first. If fewer than `count` candidates are left, they
    are repeated.

    Args:
        similarities: similarity of each query with each of b candidates [r, b].
        masked: True for candidates that must not be negatives of a query, bool [r, b].

    Raises:
        UsageError: all candidates of a query are masked.
    """
    free = (~masked).sum(axis=1)
    if not free.all():
        raise UsageError(
            "a pair has no possible negative, because all other pairs of its batch have"
            " the same image or the same words; raise loop.batch_size"
        )
    # A stable sort keeps the order of equally similar candidates.
    order = np.argsort(np.where(masked, np.inf, -similarities), axis=1, kind="stable")
    ranks = np.arange(count) % np.minimum(free, count)[:, None]
    chosen: Ints = np.take_along_axis(order, ranks, 1)
    return chosen


def mask_captions(
    captions: Sequence[TokenIds],
    probability: float,
    tokenizer: JointTokenizer,
    rng: np.random.Generator,
) -> list[TokenIds]:
    """Return a copy of `captions` in which random tokens are replaced by ``[MASK]``.

    Each token is replaced with the given `probability`. Special tokens are never
    replaced. As in the published code, ``[UNK]`` is a special token.
    """
    flat = np.concatenate(captions).astype(np.int64)
    special = [
        *map(tokenizer.special_id, SPECIAL_TOKEN_NAMES),
        tokenizer.image_token_id,
    ]
    is_masked = (rng.random(len(flat)) < probability) & ~np.isin(flat, special)
    masked = np.where(is_masked, tokenizer.special_id("mask_token"), flat)
    ends = np.cumsum([len(caption) for caption in captions])[:-1]
    return [part.tolist() for part in np.split(masked, ends)]


def masked_targets(
    captions: Sequence[TokenIds],
    masked: Sequence[TokenIds],
    starts: Ints,
) -> tuple[Tensor, Tensor]:
    """Return the positions of the masked tokens in the concatenated input rows, and the
    original token ids, int64 [number of masked tokens] each.

    Args:
        captions, masked: the captions before and after masking.
        starts: position of the ``[CLS]`` token of each caption's input row, see
            `InputRows.starts`.
    """
    flat = np.concatenate(captions).astype(np.int64)
    is_masked = flat != np.concatenate(masked)
    positions = np.concatenate(
        [start + 1 + np.arange(len(c)) for start, c in zip(starts, masked, strict=True)]
    )
    return torch.from_numpy(positions[is_masked]), torch.from_numpy(flat[is_masked])


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value`, a batch or a part of a batch, with all tensors on the CUDA device
    `device`.
    """
    if isinstance(value, Tensor):
        return value.pin_memory().to(device, non_blocking=True)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{
                f.name: to_device(getattr(value, f.name), device) for f in fields(value)
            },
        )
    if isinstance(value, tuple):
        return tuple(to_device(part, device) for part in value)
    return value


@dataclass(frozen=True)
class InputRows:
    """r input rows of the joint encoder, in buckets of rows with similar lengths.

    Each row is padded to the length of the longest row in its bucket.

    Attributes:
        buckets: for each bucket, the input rows, and the index of the image of each
            row, int64. This is an index into the images of the positive pairs of all
            workers, in rank order. If the rows of a bucket have no image tokens, its
            tensor of indices is empty.
        starts: for each row, in the order of the captions passed to `of`, the position
            of its ``[CLS]`` in the concatenated rows of all buckets, int64 [r].
    """

    buckets: tuple[tuple[JointInputs, Tensor], ...]
    starts: Tensor

    @classmethod
    def of(
        cls,
        texts: Sequence[TokenIds],
        images: Ints,
        tokenizer: JointTokenizer,
        image_tokens: int,
        buckets: int,
        plain: Sequence[TokenIds] = (),
    ) -> InputRows:
        """Make the input rows of captions.

        Args:
            texts: token ids of the captions whose rows contain image tokens. These rows
                are divided into at most `buckets` buckets.
            images: index of the image of each caption in `texts`, int64.
            image_tokens: number of image tokens per row.
            plain: token ids of the captions whose rows contain no image tokens. These
                rows are the last ones, and have a bucket of their own.
        """
        order = np.argsort([len(text) for text in texts], kind="stable")
        parts = np.array_split(order, max(1, min(buckets, len(order) // _BUCKET_ROWS)))
        every = [*texts, *plain]
        if plain:
            parts.append(np.arange(len(texts), len(every)))
        rows_of_buckets = []
        starts = np.empty(len(every), dtype=np.int64)
        end = 0
        for part in parts:
            images_of_part = images[part[part < len(texts)]]
            inputs = tokenizer.inputs_of_ids(
                [every[row] for row in part],
                image_tokens if len(images_of_part) else None,
            )
            rows_of_buckets.append((inputs, torch.from_numpy(images_of_part)))
            width = inputs.input_ids.shape[1]
            starts[part] = end + np.arange(len(part)) * width
            end += len(part) * width
        return cls(tuple(rows_of_buckets), torch.from_numpy(starts))


@dataclass(frozen=True)
class PairChunk:
    """A part of a joint-phase batch: b positive pairs, with k negative images and k
    negative texts for each pair.

    Attributes:
        pairs: number of positive pairs, b.
        negative_images: index of each negative image, like the indices of `InputRows`,
            int64 [b, k].
        rows: input rows of the joint encoder. Their order in ``rows.starts`` is:
            positive pairs, pairs with negative images, pairs with negative texts,
            positive pairs with masked captions (only with masked language modelling),
            and captions without images (only with text-embedding recovery).
        masked: positions of the masked tokens in the concatenated rows of all buckets,
            and original token ids of these tokens; None without masked language
            modelling.
        embeddings: embeddings of the captions of the positive pairs [b, e]; None
            without text-embedding recovery.
        teacher: input rows of the teacher for all positive and negative pairs; None
            without a teacher.
    """

    pairs: int
    negative_images: Tensor
    rows: InputRows
    masked: tuple[Tensor, Tensor] | None
    embeddings: Tensor | None
    teacher: InputRows | None


@dataclass(frozen=True)
class JointBatch:
    """One worker's part of a joint-phase batch.

    Attributes:
        patches: patch features of the images of the positive pairs [b, n, d_v].
        chunks: the pairs, in chunks of at most ``run.chunk_pairs``.
        teacher_tokens: the teacher's stored tokens of the images of the positive pairs;
            None if there is no teacher, or if the teacher's adapter computes the tokens
            from `patches`.
    """

    patches: Tensor
    chunks: tuple[PairChunk, ...]
    teacher_tokens: Tensor | None


@dataclass(frozen=True)
class AlignmentBatch:
    """One worker's part of an alignment-phase batch: b images with s captions each.

    Attributes:
        patches: patch features [b, n, d_v].
        words: distinct token ids of the words in all captions, int64 [w]. Special
            tokens and stop words are left out.
        shares: relative frequency of each word in each caption, float32 [w, s b]. The
            columns are ordered in s sets of b captions. A set has one caption of each
            image.
    """

    patches: Tensor
    words: Tensor
    shares: Tensor


@dataclass(frozen=True)
class BatchSource:
    """Makes the batches of one worker.

    Pairs and images are drawn in random order, which differs in each epoch. An
    incomplete batch at the end of an epoch is left out.

    Attributes:
        data: the training images, their features and their captions.
        image_tokens: number of image tokens per input row of the joint encoder.
        group: rank of this worker, and number of workers.
        on_gpu: whether a GPU computes the steps.
        teacher_tokens: number of tokens per image that the teacher reads; 0 without a
            teacher.
    """

    data: TrainingData
    tokenizer: JointTokenizer
    image_tokens: int
    config: TrainSettings
    group: WorkerGroup = ALONE
    on_gpu: bool = False
    teacher_tokens: int = 0

    def _drawn(self, number: int, count: int, size: int) -> tuple[Ints, int]:
        """Draw `size` of `count` captions or images for a batch. Return their numbers,
        int64 [size], and the number of the epoch.
        """
        epoch, batch_of_epoch = divmod(number, count // size)
        order = _permutation(count, self.config.loop.seed, epoch)
        return order[batch_of_epoch * size :][:size], epoch

    def pairs(self, number: int) -> tuple[Ints, Ints]:
        """Draw the captions of a joint-phase batch. Return the image number and the
        caption number of each, int64 [batch_size] each. An epoch contains each caption
        at most once.
        """
        size = self.config.loop.batch_size
        captions, _ = self._drawn(number, len(self.data.records), size)
        starts = self.data.caption_starts
        return np.searchsorted(starts, captions, side="right") - 1, captions

    def joint(self, number: int) -> JointBatch:
        """Return this worker's part of a joint-phase batch. Batches are numbered from 0
        over all epochs.
        """
        loop = self.config.loop
        objective = self.config.objective
        tokenizer = self.tokenizer
        images, captions = self.pairs(number)
        count = self.config.negatives.count
        rank = self.group.rank
        pairs = loop.batch_size // self.group.size
        own = np.arange(pairs) + rank * pairs
        other_images, other_texts = self.negatives(images, captions)
        # `whole` has the captions for input rows without image tokens. `texts` has the
        # same captions for rows with image tokens, which have room for one token less.
        whole = [self.data.caption(caption) for caption in captions.tolist()]
        texts = [*map(tokenizer.truncated, whole)]
        own_texts = [texts[pair] for pair in own]
        masked_texts: list[TokenIds] = []
        if objective.mlm_weight:
            rng = stream(loop.seed, MASKING, number, rank)
            masked_texts = mask_captions(
                own_texts, objective.mlm_probability, tokenizer, rng
            )
        teacher_tokens = None
        if self.data.teacher is not None:
            teacher_tokens = self.data.teacher.blocks(images[own])

        buckets = _BUCKETS_ON_GPU if self.on_gpu else _BUCKETS

        def chunk(members: Ints) -> PairChunk:
            """Return the chunk of the pairs `members`. A member is an index into the
            pairs of this worker, int64.
            """
            pairs = own[members]
            # The order of the rows is that of `PairChunk.rows`.
            row_images = np.concatenate(
                [pairs, other_images[members].ravel(), np.repeat(pairs, count)]
            )
            row_texts = [
                texts[pair]
                for pair in (
                    *pairs,
                    *np.repeat(pairs, count),
                    *other_texts[members].ravel(),
                )
            ]
            teacher = None
            if self.teacher_tokens:
                teacher = InputRows.of(
                    row_texts, row_images, tokenizer, self.teacher_tokens, buckets
                )
            plain = []
            embeddings = None
            if objective.recovery_weight:
                plain = [whole[pair] for pair in pairs]
                embeddings = torch.from_numpy(
                    self.data.records["embedding"][captions[pairs]]
                )
            masked_of_chunk = (
                [masked_texts[member] for member in members] if masked_texts else []
            )
            rows = InputRows.of(
                row_texts + masked_of_chunk,
                np.concatenate([row_images, pairs[: len(masked_of_chunk)]]),
                tokenizer,
                self.image_tokens,
                buckets,
                plain,
            )
            masked = None
            if masked_of_chunk:
                starts = rows.starts.numpy()[len(row_texts) :][: len(masked_of_chunk)]
                masked = masked_targets(
                    [own_texts[member] for member in members], masked_of_chunk, starts
                )
            negative_images = torch.from_numpy(other_images[members])
            return PairChunk(
                len(pairs), negative_images, rows, masked, embeddings, teacher
            )

        # Pairs with captions of similar length share a chunk, so that its rows have
        # little padding.
        order = np.argsort([len(text) for text in own_texts], kind="stable")
        chunk_pairs = self.config.run.chunk_pairs or (128 if self.on_gpu else 64)
        chunks = np.array_split(order, math.ceil(len(order) / chunk_pairs))
        return JointBatch(
            self.data.blocks(images[own]),
            tuple(map(chunk, chunks)),
            teacher_tokens,
        )

    def negatives(self, images: Ints, captions: Ints) -> tuple[Ints, Ints]:
        """Mine hard negatives for the b pairs in this worker's part of a batch. All
        pairs of the batch are candidates.

        Pairs with images of the same photo, or with captions of the same words, are not
        negatives of each other.

        Returns:
            Negative images of each caption, and negative texts of each image, int64 [b,
            k] each. The values are indices of pairs in the batch.
        """
        pairs = len(images) // self.group.size
        count = self.config.negatives.count
        own = slice(self.group.rank * pairs, (self.group.rank + 1) * pairs)
        data = self.data
        pictures = (data.miner or data).embeddings(images)
        tower = "embedding" if data.miner is None else "mining"
        texts = data.records[tower][captions]
        photos = data.photos[images]
        keys = data.records["key"][captions]
        masked = (photos[own, None] == photos) | (keys[own, None] == keys)
        of_captions = hard_negatives(texts[own] @ pictures.T, masked, count)
        return of_captions, hard_negatives(pictures[own] @ texts.T, masked, count)

    def alignment(self, counted: Bools, number: int) -> AlignmentBatch:
        """Return this worker's part of an alignment-phase batch, which has distinct
        images, and the same number of captions of each image. If an image has fewer
        captions, some of them are repeated.

        Args:
            counted: True for the token ids of words that the alignment uses, bool [v].
                See `scoring.parts.content_token_mask`.
        """
        data = self.data
        settings = self.config.alignment
        size = min(settings.batch_size, data.images)
        images, epoch = self._drawn(number, data.images, size)
        images = images[self.group.rank :: self.group.size]
        starts = data.caption_starts
        # The captions of an image are taken in a cycle. The first caption changes with
        # each epoch, so that later epochs use other captions of the image.
        places = images + epoch + np.arange(settings.captions)[:, None]
        captions = starts[images] + places % (starts[images + 1] - starts[images])
        words = []
        for caption in captions.ravel().tolist():
            ids = np.array(data.caption(caption), dtype=np.int64)
            words.append(ids[counted[ids]])
        distinct, position = np.unique(np.concatenate(words), return_inverse=True)
        shares = np.zeros((len(distinct), len(words)), dtype=np.float32)
        lengths = np.array([len(part) for part in words])
        np.add.at(shares, (position, np.repeat(np.arange(len(words)), lengths)), 1)
        return AlignmentBatch(
            patches=data.blocks(images),
            words=torch.from_numpy(distinct),
            shares=torch.from_numpy(shares / lengths.clip(min=1)),
        )
