"""Adapter initialisation before alignment: the learned queries start at cluster centres of patch features.

Each token is then a weighted mean of similar patches, as in NetVLAD (Arandjelovic et al., 2016). With random queries,
every token is close to the mean of all patches.
"""

from __future__ import annotations

import numpy as np
import torch

from edje_index.models.adapter import CompressionAdapter, cluster_tokens
from edje_index.training.data.dataset import TrainingData
from edje_index.training.data.features import Features
from edje_index.training.data.sampling import CLUSTERING, stream

_SAMPLE_IMAGES = 300
_SAMPLE_PATCHES = 20_000
_SHARPNESS = 4.0  # standard deviation of attention scores over patches; one deviation gives e**4 times the weight


def init_from_features(adapter: CompressionAdapter, features: Features, data: TrainingData, seed: int) -> None:
    """Initialise `adapter` in place from patch features of random training images. `seed` determines the images."""
    images = np.sort(stream(seed, CLUSTERING).permutation(data.images)[:_SAMPLE_IMAGES])
    init_queries(adapter, features.fetch_readable(data.rows[images])[0], torch.Generator().manual_seed(seed))


@torch.no_grad()
def init_queries(adapter: CompressionAdapter, patches: torch.Tensor, generator: torch.Generator) -> None:
    """Set the queries and attention weights of `adapter` from sample patches. The other weights do not change.

    Args:
        adapter: adapter to change in place.
        patches: patch features of sample images [b, n, d_v]. If b * n is less than the number of tokens per image, or
            all patches are equal, nothing changes.
        generator: random number generator that selects the patches to cluster.
    """
    width, heads = adapter.config.vision_dim, adapter.config.num_heads
    points = patches.reshape(-1, width).float()
    points = points[torch.randperm(len(points), generator=generator)[:_SAMPLE_PATCHES]]
    mean = points.mean(dim=0)
    points = points - mean
    if len(points) < adapter.config.num_tokens or not points.any():
        return
    centres = cluster_tokens(points[None], adapter.config.num_tokens)[0]
    by_head = [part.view(len(part), heads, -1).transpose(0, 1) for part in (centres, points)]
    scores = by_head[0] @ by_head[1].transpose(1, 2) / (width // heads) ** 0.5
    adapter.query.copy_(centres * (_SHARPNESS / scores.std(dim=2).mean()))
    identity = torch.eye(width)
    for linear in (adapter.key, adapter.value, adapter.attention.out_proj):
        linear.weight.copy_(identity)
        linear.bias.zero_()
    adapter.value.bias.copy_(-mean)
    adapter.attention.in_proj_weight.copy_(torch.cat([identity, identity, identity]))
    adapter.attention.in_proj_bias.zero_()
