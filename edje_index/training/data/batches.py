"""Makes the batches of the alignment phase and the joint phase, on the CPU.

A batch depends only on the data, the settings, the batch number and the rank of the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.models.joint_inputs import NUM_SPECIAL_TOKENS, JointInputs
from edje_index.training.config import TrainConfig
from edje_index.training.data.dataset import TrainingData
from edje_index.training.data.features import Features, Loaded
from edje_index.training.data.negatives import draw_negatives, mined_share, negative_mask
from edje_index.training.data.sampling import MASKING, NEGATIVE_IMAGES, NEGATIVE_TEXTS, VIEW_CHOICE, Sampler, stream
from edje_index.training.data.token_rows import SpecialTokens, TokenIds, joint_rows, mask_captions, text_rows
from edje_index.training.data.unreadable import nothing_readable

_ALIGNMENT, _JOINT = range(2)
Batch = TypeVar("Batch", "JointBatch", "AlignmentBatch")


class OnDevice:
    """Base class of dataclasses of tensors, with a method that moves all tensors to a device."""

    def to(self, device: torch.device) -> Self:
        """Return a copy with all tensors on `device`. On a CPU the tensors are not copied."""
        moved: Any = replace(self, **{f.name: _moved(getattr(self, f.name), device) for f in fields(self)})  # type: ignore[type-var,arg-type]
        return moved  # type: ignore[no-any-return]


@dataclass(frozen=True)
class JointBatch(OnDevice):
    """One worker's part of a joint-phase batch: b pairs with k negative images and k negative texts each.

    Attributes:
        pairs: number of positive pairs, b.
        negatives: number of negative images per pair, and number of negative texts per pair, k.
        patches: patch features of the images of the positive pairs [b, n, d_v], or the values from which
            `Features.finish` computes the patch features.
        inputs: input rows of the joint encoder, in this order: positive pairs, pairs with negative images, pairs with
            negative texts, masked captions (only with masked language modelling).
        image: index of the image of each row of `inputs`, int64. The images are those of the positive pairs of all
            workers, in rank order.
        masked: positions and original token ids of the masked tokens; None without masked language modelling.
        text_inputs: input rows without images, and embeddings of the captions in these rows [b, e]; None without
            text-embedding recovery.
        teacher: result of `TeacherSource.inputs` for the pairs of the batch; None without a teacher.
    """

    pairs: int
    negatives: int
    patches: torch.Tensor
    inputs: JointInputs
    image: torch.Tensor
    masked: tuple[torch.Tensor, torch.Tensor] | None
    text_inputs: tuple[JointInputs, torch.Tensor] | None
    teacher: tuple[JointInputs, torch.Tensor | None] | None


@dataclass(frozen=True)
class AlignmentBatch(OnDevice):
    """One worker's part of an alignment-phase batch: b images with s captions each.

    Attributes:
        patches: patch features [b, n, d_v], or the values from which `Features.finish` computes the patch features.
        words: distinct token ids in all captions, without special tokens and stop words, int64 [w].
        shares: relative frequency of each word in each caption, float32 [w, s b]. The columns are s sets of b captions,
            one caption per image.
    """

    patches: torch.Tensor
    words: torch.Tensor
    shares: torch.Tensor


@dataclass(frozen=True)
class TeacherSource:
    """Reads the inputs of the teacher in distillation.

    Attributes:
        tokens: number of tokens per image that the teacher's joint encoder reads.
        features: stored tokens of the teacher, or patch features from which the teacher's adapter makes tokens. None if
            the teacher's adapter reads the patch features of the batch.
        rows: row in `features` of each of the n training images, int64 [n]; None without `features`.
    """

    tokens: int
    features: Features | None = None
    rows: NDArray[np.int64] | None = None

    def inputs(
        self, texts: list[TokenIds], images: NDArray[np.int64], special_tokens: SpecialTokens
    ) -> tuple[JointInputs, torch.Tensor | None]:
        """Return one input row per caption in `texts`, and the block of each image in `images`.

        The blocks are None if the teacher's adapter reads the patch features of the batch.
        """
        inputs = joint_rows(texts, self.tokens, special_tokens)
        if self.features is None or self.rows is None:
            return inputs, None
        return inputs, self.features.fetch(self.rows[images])


@dataclass(frozen=True)
class ViewSource:
    """Reads features of augmented views, that is, of random crops of the images.

    Attributes:
        features: reads the features of all views of all images.
        rows: row of each view of each image in `features`, int64 [n, views]; -1 for a missing view.
    """

    features: Features
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class BatchSource:
    """Makes the batches of one worker.

    Attributes:
        data: images and captions to train on.
        features: reads the features of the images.
        teacher: reads the inputs of the teacher; None without a teacher.
        special_tokens: special tokens of the joint encoder's tokenizer.
        image_tokens: number of image tokens per input row of the joint encoder.
        temperature: temperature of the softmax that draws negatives; 0 selects the most similar candidates.
        config: training settings.
        rank: rank of this worker, counted from 0.
        world_size: number of workers.
        views: reads features of augmented views; None without views. For each image, a batch uses the image or a random
            view.
    """

    data: TrainingData
    features: Features
    teacher: TeacherSource | None
    special_tokens: SpecialTokens
    image_tokens: int
    temperature: float
    config: TrainConfig
    rank: int = 0
    world_size: int = 1
    views: ViewSource | None = None

    def joint(self, number: int) -> JointBatch:
        """Return this worker's part of a joint-phase batch. Batches are numbered from 0 over all epochs.

        A pair whose image cannot be read is replaced by another pair of the same part.

        Raises:
            EdjeError: none of the images can be read.
        """
        loop, objective = self.config.loop, self.config.objective
        images, captions = Sampler(self.data, loop.batch_size, loop.seed, loop.epoch_of).pairs(number)
        positives = slice(0, loop.batch_size // self.world_size)
        local = np.arange(positives.stop) + self.rank * positives.stop
        loaded = self._load(images[local], _JOINT, number)
        pair_images, pair_captions = self._pairs(number, images, captions, local[_replacements(loaded.readable)])
        texts = [self._token_ids(caption) for caption in pair_captions]
        rows, row_images, masked = texts, pair_images, None
        if objective.mlm_weight:
            rng = stream(loop.seed, MASKING, number, self.rank)
            masking = mask_captions(texts[positives], objective.mlm_probability, self.special_tokens.mask, rng)
            rows, row_images = texts + masking.captions, np.concatenate([pair_images, pair_images[positives]])
        inputs = joint_rows(rows, self.image_tokens, self.special_tokens)
        if objective.mlm_weight:
            masked = masking.flat_targets(inputs.input_ids.shape[1])
        recovered = objective.recovery_weight > 0
        return JointBatch(
            pairs=positives.stop,
            negatives=self.config.negatives.count,
            patches=loaded.values,
            inputs=inputs,
            image=torch.from_numpy(row_images),
            masked=masked,
            text_inputs=self._text_inputs(texts[positives], pair_captions[positives]) if recovered else None,
            teacher=None if self.teacher is None else self.teacher.inputs(texts, images[local], self.special_tokens),
        )

    def with_features(self, batch: Batch) -> Batch:
        """Return `batch` with its patch features, on the device of the batch.

        For online features, this method runs the vision tower.
        """
        return replace(batch, patches=self.features.finish(batch.patches))

    def _pairs(
        self, number: int, images: NDArray[np.int64], captions: NDArray[np.int64], own: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the image and the caption of each pair of this worker, int64 [b (1 + 2 k)] each.

        An image is given by its position in the batch, and a caption by its number. The positive pairs come first. They
        are the pairs of the batch at the positions `own`.
        """
        other_images, other_texts = (drawn[own] for drawn in self.negatives(number, images, captions))
        count = other_images.shape[1]
        return (
            np.concatenate([own, other_images.ravel(), np.repeat(own, count)]),
            np.concatenate([captions[own], np.repeat(captions[own], count), captions[other_texts.ravel()]]),
        )

    def negatives(
        self, number: int, images: NDArray[np.int64], captions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw the negatives of the batch `number`, for all workers.

        Args:
            number: batch number.
            images: image number of each pair, int64 [batch_size].
            captions: caption number of each pair, int64 [batch_size].

        Returns:
            Negative images of each caption and negative texts of each image, int64 [batch_size, k] each. The values are
            positions in the batch.
        """
        settings, loop = self.config.negatives, self.config.loop
        similarities = self.data.text_mining[captions] @ self.data.image_mining[images].T
        masked = negative_mask(self.data.rows[images], self.data.caption_keys[captions])
        mined = mined_share(number // loop.accumulate, settings.curriculum_steps)
        drawn = [
            draw_negatives(
                scores,
                masked,
                count=settings.count,
                temperature=self.temperature,
                mined=mined,
                rng=stream(loop.seed, purpose, number),
            )
            for scores, purpose in ((similarities, NEGATIVE_IMAGES), (similarities.T, NEGATIVE_TEXTS))
        ]
        return drawn[0], drawn[1]

    def alignment(self, counted: NDArray[np.bool_]) -> Callable[[int], AlignmentBatch]:
        """Return a function that maps a batch number to this worker's part of the alignment-phase batch.

        Args:
            counted: which token ids are words to align, bool [v], see `stop_words.content_token_mask`.
        """
        settings, seed = self.config.alignment, self.config.loop.seed
        sampler = Sampler(self.data, min(settings.batch_size, self.data.images), seed)

        def batch(number: int) -> AlignmentBatch:
            images, captions = sampler.sets(number, settings.captions)
            local = np.arange(self.rank, len(images), self.world_size)
            loaded = self._load(images[local], _ALIGNMENT, number)
            local = local[loaded.readable]
            if not len(local):
                raise nothing_readable()
            words = [ids[counted[ids]] for ids in map(self._token_ids, captions[:, local].ravel().tolist())]
            distinct, position = np.unique(np.concatenate(words), return_inverse=True)
            shares = np.zeros((len(distinct), len(words)), dtype=np.float32)
            lengths = np.array([len(part) for part in words])
            np.add.at(shares, (position, np.repeat(np.arange(len(words)), lengths)), 1)
            return AlignmentBatch(
                patches=loaded.values[torch.from_numpy(loaded.readable)],
                words=torch.from_numpy(distinct.astype(np.int64)),
                shares=torch.from_numpy(shares / lengths.clip(min=1)),
            )

        return batch

    def _load(self, images: NDArray[np.int64], phase: int, number: int) -> Loaded:
        """Load each image, or a random view of the image."""
        rows = self.data.rows[images]
        if self.views is None:
            return self.features.load(rows)
        rng = stream(self.config.loop.seed, VIEW_CHOICE, phase, number, self.rank)
        view = rng.integers(-1, self.views.rows.shape[1], size=len(images))
        view_rows = np.where(view < 0, -1, self.views.rows[images, view])
        is_view = view_rows >= 0
        photos, views = self.features.load(rows[~is_view]), self.views.features.load(view_rows[is_view])
        order = np.argsort(np.argsort(is_view, kind="stable"), kind="stable")
        return Loaded(
            torch.cat([photos.values, views.values])[torch.from_numpy(order)],
            np.concatenate([photos.readable, views.readable])[order],
        )

    def _token_ids(self, caption: int) -> TokenIds:
        return self.data.caption(caption)[: self.config.objective.text_length - NUM_SPECIAL_TOKENS]

    def _text_inputs(self, texts: list[TokenIds], captions: NDArray[np.int64]) -> tuple[JointInputs, torch.Tensor]:
        return text_rows(texts, self.special_tokens), torch.from_numpy(self.data.text_embeddings[captions])


def _replacements(readable: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the position of the pair to train instead of each pair, int64 [b].

    A readable pair is not replaced. An unreadable pair is replaced by the next readable pair.
    """
    positions, usable = np.arange(len(readable)), np.flatnonzero(readable)
    if not len(usable):
        raise nothing_readable()
    following: NDArray[np.int64] = usable[np.searchsorted(usable, positions) % len(usable)]
    return following


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value
    if isinstance(value, JointInputs):
        return JointInputs(*(_moved(getattr(value, f.name), device) for f in fields(value)))
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    return value
