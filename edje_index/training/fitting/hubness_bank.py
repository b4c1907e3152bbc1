"""Makes the hubness bank of a trained bundle: a random sample of the training captions and images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edje_index.progress import OnProgress
from edje_index.scoring.hubness import HubnessBank
from edje_index.scoring.pooled_similarity import PooledVectors
from edje_index.training.data.batches import BatchSource
from edje_index.training.data.sampling import BANK, stream
from edje_index.training.data.token_rows import SpecialTokens, joint_rows
from edje_index.training.data.unreadable import nothing_readable

_BATCH = 64
_ACTIVITY = "making the hubness bank, captions and images"


@torch.inference_mode()
def make_hubness_bank(
    adapter: nn.Module,
    vectors: PooledVectors,
    source: BatchSource,
    count: int,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> HubnessBank:
    """Make a hubness bank of at most `count` random captions and `count` random images of the training data.

    Images that cannot be read are left out. The bank is on the CPU.

    Args:
        adapter: the trained adapter, which maps features [b, n, d_v] to tokens [b, m, d].
        vectors: computes the pooled vectors. If the bundle has no pooled similarity, the vectors have width 0.
        source: features and captions of the training data.
        count: maximum number of captions in the bank, and maximum number of images in the bank.
        on_progress: called with the number of captions and images that are finished.

    Raises:
        EdjeError: none of the images of the sample can be read.
    """
    data, rng = source.data, stream(source.config.loop.seed, BANK)
    captions = np.sort(rng.permutation(len(data.text_embeddings))[:count])
    images = np.sort(rng.permutation(data.images)[:count])
    sample = _Sample(adapter, vectors, source, len(captions) + len(images), on_progress)
    caption_vectors = sample.caption_vectors(captions)
    image_vectors, readable = sample.image_vectors(images)
    return HubnessBank.of(
        (torch.from_numpy(data.text_embeddings[captions]), caption_vectors),
        (source.features.embeddings(data.rows[images[readable]]), image_vectors),
    )


@dataclass
class _Sample:
    """Computes pooled vectors of training captions and images."""

    adapter: nn.Module
    vectors: PooledVectors
    source: BatchSource
    total: int
    on_progress: OnProgress
    done: int = 0

    def caption_vectors(self, captions: NDArray[np.int64]) -> torch.Tensor:
        joint, pooled = self.vectors.joint, self.vectors.pooled
        if pooled is None:
            return torch.zeros(len(captions), 0)
        special_tokens = SpecialTokens.of(joint.tokenizer)
        chunks = []
        for batch in self._batches(captions):
            token_ids = [self.source.data.caption(caption) for caption in batch]
            sentences = joint.sentence_vectors(joint_rows(token_ids, 0, special_tokens))
            chunks.append(pooled.captions([ids.tolist() for ids in token_ids], sentences).cpu())
        return torch.cat(chunks)

    def image_vectors(self, images: NDArray[np.int64]) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Return the vectors of the images that can be read, and which of the k `images` can be read, bool [k]."""
        if self.vectors.pooled is None:
            return torch.zeros(len(images), 0), np.ones(len(images), dtype=bool)
        chunks, readable = [], []
        for batch in self._batches(images):
            features, are_readable = self.source.features.fetch_readable(self.source.data.rows[batch])
            readable.append(are_readable)
            if are_readable.any():
                tokens = self.adapter(features.to(self.vectors.joint.device).float())
                chunks.append(self.vectors.of_images(tokens.bfloat16()).cpu())  # bfloat16, as an index stores tokens
        if not chunks:
            raise nothing_readable()
        return torch.cat(chunks), np.concatenate(readable)

    def _batches(self, positions: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        for start in range(0, len(positions), _BATCH):
            self.on_progress(_ACTIVITY, self.done, self.total)
            yield positions[start : start + _BATCH]
            self.done += len(positions[start : start + _BATCH])
