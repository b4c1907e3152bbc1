"""The batches of both phases: what a rank computes on, ready but for the device.

Everything here is a function of (data, configuration, number of the batch, rank) alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.models.adapter import PATCH_REDUCTIONS, Adapter, AdapterConfig, build_adapter
from edje_index.models.bf16 import as_tensor
from edje_index.models.joint_inputs import NUM_SPECIAL_TOKENS, JointInputs
from edje_index.training.config import TrainConfig
from edje_index.training.data.dataset import TrainingData
from edje_index.training.data.negatives import draw_negatives, mined_share, negative_mask
from edje_index.training.data.sampling import MASKING, NEGATIVE_IMAGES, NEGATIVE_TEXTS, SEEN_VIEWS, Sampler, stream
from edje_index.training.data.token_rows import SpecialTokens, Tokens, joint_rows, mask_captions, text_rows
from storage_formats.errors import CorruptIndexError
from storage_formats.token_store import TokenStore

_ALIGNMENT, _JOINT = range(2)


class OnDevice:
    """A dataclass of tensors, rows and plain values that moves as one."""

    def to(self, device: torch.device) -> Self:
        """The same on `device`."""
        moved: Any = replace(self, **{f.name: _moved(getattr(self, f.name), device) for f in fields(self)})  # type: ignore[type-var,arg-type]
        return moved  # type: ignore[no-any-return]


@dataclass(frozen=True)
class JointBatch(OnDevice):
    """One rank's part of a batch: b pairs with k negative images and k negative texts each.

    Attributes:
        pairs: b. The rows of `inputs` are b positive pairs, b k negative images, b k negative texts (each anchor's
            side by side), then b rows with masked captions, where there is masked language modelling.
        negatives: k.
        patches: features of the u distinct images [u, n, d_v].
        inputs: rows of the joint encoder.
        image: which of the u images each row has.
        masked: places of the masked tokens in the flattened last b rows; and what stood there.
        text_inputs: the b captions alone, and what the text tower makes of them [b, e]; None without recovery.
        teacher: the teacher's rows of the pairs, and its tokens or features of the u images; None without a teacher.
    """

    pairs: int
    negatives: int
    patches: torch.Tensor
    inputs: JointInputs
    image: torch.Tensor
    masked: tuple[torch.Tensor, torch.Tensor] | None
    text_inputs: tuple[JointInputs, torch.Tensor] | None
    teacher: tuple[JointInputs, torch.Tensor] | None


@dataclass(frozen=True)
class AlignmentBatch(OnDevice):
    """b images with s captions each.

    Attributes:
        patches: features [b, n, d_v].
        words: numbers of the distinct content words of all captions [w].
        shares: which part of each caption's content words each of them is, float32 [w, s b]; a caption of each image
            in order, then another of each.
    """

    patches: torch.Tensor
    words: torch.Tensor
    shares: torch.Tensor


class Features:
    """Blocks of an index as tensors.

    Args:
        root: the index.
        trained: the adapter that they are for. Where it reduces an image's patches and the index holds all of them,
            they are reduced as they are read.
    """

    def __init__(self, root: Path, trained: AdapterConfig | None = None) -> None:
        self._root = root
        self._store = TokenStore.open(root)
        self._reduction: Adapter | None = None
        if trained is not None and trained.kind in PATCH_REDUCTIONS and trained.num_tokens < self._store.block_shape[0]:
            self._reduction = build_adapter(trained.features(self._store.block_shape[0]))

    @torch.inference_mode()
    def fetch(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """bfloat16 [k, n, d]. CorruptIndexError where a row has none."""
        blocks = self._store.fetch(rows)
        if self._store.holes(blocks).any():
            raise CorruptIndexError(f"{self._root} lacks the features of row {rows[self._store.holes(blocks)][0]}")
        tensor = as_tensor(blocks)
        return tensor if self._reduction is None else self._reduction(tensor.float()).bfloat16()


@dataclass(frozen=True)
class TeacherSource:
    """What a teacher reads.

    Attributes:
        features: its tokens, or features for its adapter.
        rows: of each image among them, int64 [n].
        tokens: how many image tokens its joint encoder reads.
    """

    features: Features
    rows: NDArray[np.int64]
    tokens: int

    def inputs(
        self, texts: list[Tokens], images: NDArray[np.int64], special_tokens: SpecialTokens
    ) -> tuple[JointInputs, torch.Tensor]:
        """Rows of pairs with the captions `texts`, and the blocks of the distinct `images`."""
        return joint_rows(texts, self.tokens, special_tokens), self.features.fetch(self.rows[images])


@dataclass(frozen=True)
class ViewSource:
    """Features of further views of the photos.

    Attributes:
        features: of all views.
        rows: of each image's views among them, int64 [n, views]; -1 for none.
    """

    features: Features
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class BatchSource:
    """Where batches come from.

    Attributes:
        data: captions.
        features: of the frozen tower.
        teacher: what the teacher reads, where there is one.
        special_tokens: the tokenizer's special words.
        image_tokens: m of the adapter.
        temperature: of the mining softmax.
        config: of the training.
        rank, world_size: which part of every batch.
        views: of which each image of a batch shows one, or itself, at random; None without.
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
        """Batch `number` of the joint phase, counted from 0 over the whole training."""
        loop, objective = self.config.loop, self.config.objective
        images, captions = Sampler(self.data, loop.batch_size, loop.seed).pairs(number)
        pair_images, pair_captions = self._pairs(number, images, captions)
        own = slice(0, loop.batch_size // self.world_size)
        texts = [self._tokens(at) for at in pair_captions]
        rows, row_images, masked = texts, pair_images, None
        if objective.mlm_weight:
            rng = stream(loop.seed, MASKING, number, self.rank)
            covered = mask_captions(texts[own], objective.mlm_probability, self.special_tokens.mask, rng)
            rows, row_images = texts + covered.captions, np.concatenate([pair_images, pair_images[own]])
        inputs = joint_rows(rows, self.image_tokens, self.special_tokens)
        if objective.mlm_weight:
            masked = covered.places(inputs.input_ids.shape[1])
        distinct, image = np.unique(row_images, return_inverse=True)
        return JointBatch(
            pairs=own.stop,
            negatives=self.config.negatives.negatives,
            patches=self._patches(distinct, _JOINT, number),
            inputs=inputs,
            image=torch.from_numpy(image.astype(np.int64)),
            masked=masked,
            text_inputs=self._text_inputs(texts[own], pair_captions[own]) if objective.recovery_weight else None,
            teacher=None if self.teacher is None else self.teacher.inputs(texts, distinct, self.special_tokens),
        )

    def _pairs(
        self, number: int, images: NDArray[np.int64], captions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Image and caption of this rank's positives, then of their negative images, then of their negative texts."""
        part = len(images) // self.world_size
        local = slice(self.rank * part, (self.rank + 1) * part)
        other_images, other_texts = (drawn[local] for drawn in self.negatives(number, images, captions))
        count = other_images.shape[1]
        return (
            np.concatenate([images[local], images[other_images.ravel()], np.repeat(images[local], count)]),
            np.concatenate([captions[local], np.repeat(captions[local], count), captions[other_texts.ravel()]]),
        )

    def negatives(
        self, number: int, images: NDArray[np.int64], captions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places in the whole batch of the negative images of each caption and the negative texts of each image."""
        settings, loop = self.config.negatives, self.config.loop
        similar = self.data.text_mining[captions] @ self.data.image_mining[images].T
        masked = negative_mask(self.data.rows[images], self.data.caption_keys[captions])
        mined = mined_share(number // loop.accumulate, settings.negatives_curriculum)
        drawn = [
            draw_negatives(
                scores, masked, settings.negatives, self.temperature, mined, stream(loop.seed, purpose, number)
            )
            for scores, purpose in ((similar, NEGATIVE_IMAGES), (similar.T, NEGATIVE_TEXTS))
        ]
        return drawn[0], drawn[1]

    def alignment(self, content: NDArray[np.bool_]) -> Callable[[int], AlignmentBatch]:
        """Batches of the alignment phase; `content` says of each word of the vocabulary whether it counts."""
        settings, seed = self.config.alignment, self.config.loop.seed
        sampler = Sampler(self.data, min(settings.align_batch_size, self.data.images), seed)

        def batch(number: int) -> AlignmentBatch:
            images, captions = sampler.sets(number, settings.align_captions)
            own = slice(self.rank, None, self.world_size)
            words = [tokens[content[tokens]] for tokens in map(self._tokens, captions[:, own].ravel().tolist())]
            distinct, place = np.unique(np.concatenate(words), return_inverse=True)
            shares = np.zeros((len(distinct), len(words)), dtype=np.float32)
            lengths = np.array([len(part) for part in words])
            np.add.at(shares, (place, np.repeat(np.arange(len(words)), lengths)), 1)
            return AlignmentBatch(
                patches=self._patches(images[own], _ALIGNMENT, number),
                words=torch.from_numpy(distinct.astype(np.int64)),
                shares=torch.from_numpy(shares / lengths.clip(min=1)),
            )

        return batch

    def _patches(self, images: NDArray[np.int64], phase: int, number: int) -> torch.Tensor:
        """Features [k, n, d_v] of `images`, or of a view of each, drawn by the number of the batch."""
        rows = self.data.rows[images]
        if self.views is None:
            return self.features.fetch(rows)
        rng = stream(self.config.loop.seed, SEEN_VIEWS, phase, number, self.rank)
        view = rng.integers(-1, self.views.rows.shape[1], size=len(images))
        view_rows = np.where(view < 0, -1, self.views.rows[images, view])
        seen = torch.from_numpy(view_rows >= 0)
        photos, views = self.features.fetch(rows[view_rows < 0]), self.views.features.fetch(view_rows[view_rows >= 0])
        patches = photos.new_empty(len(images), *photos.shape[1:])
        patches[~seen], patches[seen] = photos, views
        return patches

    def _tokens(self, caption: int) -> Tokens:
        return self.data.caption(caption)[: self.config.objective.text_length - NUM_SPECIAL_TOKENS]

    def _text_inputs(self, tokens: list[Tokens], captions: NDArray[np.int64]) -> tuple[JointInputs, torch.Tensor]:
        return text_rows(tokens, self.special_tokens), torch.from_numpy(self.data.text_embeddings[captions])


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value
    if isinstance(value, JointInputs):
        return JointInputs(*(_moved(getattr(value, f.name), device) for f in fields(value)))
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    return value
