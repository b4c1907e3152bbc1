"""What a new compressing adapter begins the alignment as, found from features and captions without a step."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.models.adapter import CompressionAdapter
from edje_index.training.data.batches import BatchSource
from edje_index.training.data.dataset import TrainingData
from edje_index.training.data.sampling import CLUSTERING, stream
from edje_index.training.model.projection_init import FIT_IMAGES, begin_at_words
from edje_index.training.model.query_init import SAMPLE_IMAGES, begin_at_clusters

CLUSTERS, FITTED = "clusters", "fitted"
_READ_IMAGES = 256


def begin_adapter(
    adapter: CompressionAdapter, source: BatchSource, words: torch.Tensor, content: NDArray[np.bool_]
) -> None:
    """Set what `align_start` asks for: queries at clusters of patches, a projection that maps patches to words.

    It is decided by the training's seed.

    Args:
        adapter: of which the queries, keys, values and the projection are set.
        source: of features and captions.
        words: vectors of the vocabulary [v, d].
        content: which words count [v].
    """
    start, seed, data = source.config.alignment.align_start, source.config.loop.seed, source.data
    if start not in (CLUSTERS, FITTED):
        return
    chosen = stream(seed, CLUSTERING).permutation(data.images)
    sample = source.features.fetch(data.rows[np.sort(chosen[:SAMPLE_IMAGES])])
    begin_at_clusters(adapter, sample, torch.Generator().manual_seed(seed))
    if start == CLUSTERS:
        return
    images = [at for at in np.sort(chosen[:FIT_IMAGES]).tolist() if len(_content_words(data, at, content))]
    if not images:
        return
    pieces = [images[start : start + _READ_IMAGES] for start in range(0, len(images), _READ_IMAGES)]
    patches = torch.cat([source.features.fetch(data.rows[piece]).float().mean(dim=1) for piece in pieces])
    described = torch.stack([words[_content_words(data, at, content)].mean(dim=0) for at in images])
    begin_at_words(adapter, patches.double(), described.double(), words)


def _content_words(data: TrainingData, image: int, content: NDArray[np.bool_]) -> NDArray[np.int64]:
    """All content words of an image's captions, each as often as it comes."""
    first, last = data.token_starts[data.caption_starts[[image, image + 1]]]
    tokens = data.tokens[first:last].astype(np.int64)
    found: NDArray[np.int64] = tokens[content[tokens]]
    return found
