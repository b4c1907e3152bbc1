"""The query bank of a trained bundle: captions and images that it was trained on, drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edje_index.models.joint_encoder import JointEncoder
from edje_index.scoring.hubness import QueryBank
from edje_index.training.data.batches import BatchSource
from edje_index.training.data.dataset import image_embeddings
from edje_index.training.data.sampling import BANK, stream
from edje_index.training.data.token_rows import SpecialTokens, joint_rows

_BATCH = 64

OnProgress = Callable[[int, int], None]
"""Called with captions and images done, and their number."""


@torch.inference_mode()
def make_bank(
    adapter: nn.Module,
    joint: JointEncoder,
    source: BatchSource,
    index: Path,
    count: int,
    on_progress: OnProgress = lambda done, total: None,
) -> QueryBank:
    """A bank of `count` captions and `count` images, or as many as there are; on the CPU, without a weight.

    Args:
        adapter: from features [b, n, d_v] to tokens [b, m, d], trained.
        joint: with the pooled similarity, where there is one.
        source: of features and captions.
        index: of the features, which holds the images' embeddings too.
        count: at most.
        on_progress: of making the vectors of both.
    """
    data, rng = source.data, stream(source.config.loop.seed, BANK)
    captions = np.sort(rng.permutation(len(data.text_embeddings))[:count])
    images = np.sort(rng.permutation(data.images)[:count])
    vectors = _Vectors(joint, len(captions) + len(images), on_progress)
    return QueryBank.of(
        (torch.from_numpy(data.text_embeddings[captions]), vectors.of_captions(source, captions)),
        (torch.from_numpy(image_embeddings(index, data.rows[images])), vectors.of_images(source, images, adapter)),
    )


@dataclass
class _Vectors:
    """Vectors of the pooled similarity, of width 0 where there is none."""

    joint: JointEncoder
    total: int
    on_progress: OnProgress
    done: int = 0

    def of_captions(self, source: BatchSource, captions: NDArray[np.int64]) -> torch.Tensor:
        if (pooled := self.joint.pooled) is None:
            return torch.zeros(len(captions), 0)
        special_tokens = SpecialTokens.of(self.joint.tokenizer)
        parts = []
        for places in self._batches(captions):
            numbers = [source.data.caption(at) for at in places]
            sentences = self.joint.sentence_vectors(joint_rows(numbers, 0, special_tokens))
            parts.append(pooled.captions([each.tolist() for each in numbers], sentences).cpu())
        return torch.cat(parts)

    def of_images(self, source: BatchSource, images: NDArray[np.int64], adapter: nn.Module) -> torch.Tensor:
        if self.joint.pooled is None:
            return torch.zeros(len(images), 0)
        device = self.joint.text_projection.weight.device
        parts = []
        for places in self._batches(images):
            blocks = source.features.fetch(source.data.rows[places]).to(device).float()
            parts.append(self.joint.image_vectors(adapter(blocks).bfloat16()).cpu())  # as they are stored
        return torch.cat(parts)

    def _batches(self, places: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        for start in range(0, len(places), _BATCH):
            self.on_progress(self.done, self.total)
            yield places[start : start + _BATCH]
            self.done += len(places[start : start + _BATCH])
