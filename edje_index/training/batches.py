"""Makes the batches of the alignment phase and the joint phase from the data set.
Batches are made on the CPU.

A batch is divided among all workers, and each worker makes only its own part. This part
depends only on the data, the settings, the batch number, the rank of the worker and the
number of workers. Workers therefore make their parts without communicating.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edje_index.models.joint_inputs import (
    SPECIAL_TOKEN_NAMES,
    JointInputs,
    JointTokenizer,
)
from edje_index.scoring.parts import content_token_mask
from edje_index.training.config import TrainSettings
from edje_index.training.dataset import TrainingData
from edje_index.training.workers import ALONE, WorkerGroup
from storage_formats.arrays import Bools, Ints
from storage_formats.errors import UsageError

TokenIds = list[int]
# Purposes of random numbers, see `stream`.
ORDER, MASKING, DROPOUT, CLUSTERING = range(4)
POOLING = 6


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
            " the same image or the same words; train again in a new run folder with a"
            " higher loop.batch_size"
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
    special = [*map(tokenizer.special_id, SPECIAL_TOKEN_NAMES)]
    is_masked = (rng.random(len(flat)) < probability) & ~np.isin(flat, special)
    masked = np.where(is_masked, tokenizer.special_id("mask_token"), flat)
    ends = np.cumsum([len(caption) for caption in captions])[:-1]
    return [part.tolist() for part in np.split(masked, ends)]


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value`, a batch or a part of a batch, with all tensors on `device`."""
    if isinstance(value, Tensor):
        # A copy from pinned memory to a GPU does not wait for earlier steps.
        pinned = value.pin_memory() if device.type == "cuda" else value
        return pinned.to(device, non_blocking=True)
    if isinstance(value, tuple):
        parts = [to_device(part, device) for part in value]
        # A named tuple takes its values one by one.
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


class PairChunk(NamedTuple):
    """A part of a joint-phase batch: b positive pairs, with k negative images and k
    negative texts for each pair.

    An index of an image counts the images of the positive pairs of all workers, in rank
    order.

    Attributes:
        pairs: number of positive pairs, b.
        negative_images: index of each negative image, int64 [b, k].
        rows: r input rows of the joint encoder: positive pairs, pairs with negative
            images, pairs with negative texts, and positive pairs with masked captions
            (only with masked language modelling).
        images: index of the image of each row, int64 [r].
        masked: for each masked token, the index of its pair and its position in the
            row; None without masked language modelling.
        recovery: input rows of the captions of the positive pairs without images, and
            the embeddings of these captions [b, e]; None without text-embedding
            recovery.
        teacher: input rows of the teacher for all positive and negative pairs, in the
            order of `rows`; None without a teacher.
    """

    pairs: int
    negative_images: Tensor
    rows: JointInputs
    images: Tensor
    masked: tuple[Tensor, ...] | None
    recovery: tuple[JointInputs, Tensor] | None
    teacher: JointInputs | None


class JointBatch(NamedTuple):
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


class AlignmentBatch(NamedTuple):
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
        teacher_tokens: number of tokens per image that the teacher reads; 0 without a
            teacher.
    """

    data: TrainingData
    tokenizer: JointTokenizer
    image_tokens: int
    config: TrainSettings
    group: WorkerGroup = ALONE
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

        def chunk(members: Ints) -> PairChunk:
            """Return the chunk of the pairs `members`. A member is an index into the
            pairs of this worker, int64.
            """
            pairs = own[members]
            # The order of the rows is that of `PairChunk.rows`.
            row_images = [pairs, other_images[members].ravel(), np.repeat(pairs, count)]
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
                teacher = tokenizer.inputs_of_ids(row_texts, self.teacher_tokens)
            if masked_texts:
                row_texts += [masked_texts[member] for member in members]
                row_images.append(pairs)
            rows = tokenizer.inputs_of_ids(row_texts, self.image_tokens)
            masked = None
            if masked_texts:
                ids = rows.input_ids
                is_masked = ids[-len(pairs) :] != ids[: len(pairs)]
                masked = is_masked.nonzero(as_tuple=True)
            recovery = None
            if objective.recovery_weight:
                plain = [whole[pair] for pair in pairs]
                embeddings = self.data.records["embedding"][captions[pairs]]
                recovery = (
                    tokenizer.inputs_of_ids(plain, None),
                    torch.from_numpy(embeddings),
                )
            return PairChunk(
                pairs=len(pairs),
                negative_images=torch.from_numpy(other_images[members]),
                rows=rows,
                images=torch.from_numpy(np.concatenate(row_images)),
                masked=masked,
                recovery=recovery,
                teacher=teacher,
            )

        # Pairs with captions of similar length share a chunk, so that its rows have
        # little padding.
        order = np.argsort([len(text) for text in own_texts], kind="stable")
        count_of_chunks = math.ceil(len(order) / self.config.run.chunk_pairs)
        chunks = np.array_split(order, count_of_chunks)
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

    def alignment(self, number: int) -> AlignmentBatch:
        """Return this worker's part of an alignment-phase batch, which has distinct
        images, and the same number of captions of each image. If an image has fewer
        captions, some of them are repeated.
        """
        counted = content_token_mask(self.tokenizer)
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
