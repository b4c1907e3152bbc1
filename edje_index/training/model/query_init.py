"""Where the compressing adapter's attention begins.

With random queries every token begins as nearly the mean patch, and must first learn to look somewhere. Here each query
begins as the centre of a cluster of patches, and keys and values as the patches themselves, so that a token is a soft
mean of the patches of one sort, as in NetVLAD (Arandjelovic et al., 2016), and all that follows is learned.
"""

from __future__ import annotations

import torch

from edje_index.models.adapter import CompressionAdapter
from edje_index.models.reduction import cluster_tokens

SAMPLE_IMAGES = 300
_SAMPLE_PATCHES = 20_000
_SHARPNESS = 4.0  # standard deviation of an attention score over patches; e**4 between a usual patch and a fitting one


@torch.no_grad()
def begin_at_clusters(adapter: CompressionAdapter, patches: torch.Tensor, generator: torch.Generator) -> None:
    """Set queries, keys and values of `adapter` from a sample of what it will see.

    Args:
        adapter: its MLP and projection stay as they are.
        patches: features [b, n, d_v]; with fewer than m of them, or all alike, the adapter stays as it is.
        generator: chooses which patches are clustered.
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
    same = torch.eye(width)
    for linear in (adapter.key, adapter.value, adapter.attention.out_proj):
        linear.weight.copy_(same)
        linear.bias.zero_()
    adapter.value.bias.copy_(-mean)
    adapter.attention.in_proj_weight.copy_(torch.cat([same, same, same]))
    adapter.attention.in_proj_bias.zero_()
