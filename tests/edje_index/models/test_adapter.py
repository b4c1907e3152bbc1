"""Adapters made from a configuration, and reductions without training."""

from dataclasses import replace

import pytest
import torch

from edje_index.errors import ModelError
from edje_index.models.adapter import (
    CLUSTERED,
    COMPRESSED,
    PRUNED,
    STRIDED,
    AdapterConfig,
    build_adapter,
    cluster_tokens,
    prune_tokens,
    stride_tokens,
)

CONFIG = AdapterConfig(
    COMPRESSED, num_tokens=3, vision_dim=8, language_dim=6, hidden_dim=10, num_heads=2
)
PATCHES = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
RECEIVED = torch.rand(2, 9, generator=torch.Generator().manual_seed(1))


def test_patches_are_stored_untouched_by_an_adapter_without_weights():
    adapter = build_adapter(
        AdapterConfig(
            "patches", num_tokens=9, vision_dim=8, language_dim=8, hidden_dim=0
        )
    )
    assert torch.equal(adapter(PATCHES), PATCHES)
    assert not adapter.state_dict()
    assert adapter.config.is_feature
    with pytest.raises(ModelError, match="hidden_dim must be 0 for a patches adapter"):
        build_adapter(replace(adapter.config, hidden_dim=4))


@pytest.mark.parametrize("kind", [STRIDED, CLUSTERED, PRUNED])
def test_training_free_kinds_reduce_then_apply_the_local_layer(kind):
    reduced = {
        STRIDED: stride_tokens(PATCHES, 3),
        CLUSTERED: cluster_tokens(PATCHES, 3),
        PRUNED: prune_tokens(PATCHES, RECEIVED, 3),
    }[kind]
    arguments = (PATCHES, RECEIVED) if kind == PRUNED else (PATCHES,)
    adapter = build_adapter(replace(CONFIG, kind=kind))
    assert torch.equal(adapter(*arguments), adapter.local(reduced))
    assert adapter(*arguments).shape == (2, 3, 6)
    assert adapter.needs_attention == (kind == PRUNED)
    bare = build_adapter(replace(CONFIG, kind=kind, hidden_dim=0, language_dim=8))
    assert torch.equal(bare(*arguments), reduced)
    assert not list(bare.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "other"}, "unknown adapter 'other'"),
        ({"num_tokens": 0}, "must be positive"),
        ({"num_heads": 3}, "not divisible by 3 heads"),
        ({"activation": "nope"}, "unknown activation 'nope'"),
        ({"hidden_dim": 0}, "hidden_dim must be 0"),
        ({"kind": STRIDED, "hidden_dim": 0}, "hidden_dim must be 0"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ModelError, match=message):
        build_adapter(replace(CONFIG, **changes))


def random_tokens(b, n, d, seed=0):
    return torch.randn(b, n, d, generator=torch.Generator().manual_seed(seed))


def test_stride_spreads_evenly_whatever_the_counts():
    for n in range(1, 40):
        for m in range(1, n + 1):
            positions = stride_tokens(torch.arange(n)[None, :, None], m)[0, :, 0]
            assert (positions[0], len(positions)) == (0, m)
            assert set(torch.diff(positions).tolist()) <= {n // m, -(-n // m)}


def test_prune_keeps_the_most_attended_in_image_order():
    tokens = torch.arange(5.0)[None, :, None].repeat(2, 1, 1)
    received = torch.tensor([[0.1, 0.5, 0.2, 0.9, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2]])
    assert prune_tokens(tokens, received, 3)[:, :, 0].tolist() == [[1, 3, 4], [0, 1, 2]]


def test_centroids_are_the_means_of_their_tokens():
    tokens = random_tokens(3, 50, 4)
    centroids = cluster_tokens(tokens, 8)
    assert centroids.dtype == torch.float32
    nearest = torch.cdist(tokens, centroids).argmin(dim=2)
    for image in range(3):
        for cluster in range(8):
            members = tokens[image][nearest[image] == cluster]
            torch.testing.assert_close(
                centroids[image, cluster], members.mean(dim=0), atol=1e-5, rtol=0
            )


def test_clusters_of_equal_tokens_have_no_holes():
    """All clusters but one lose their tokens; none may turn into NaN."""
    assert torch.equal(cluster_tokens(torch.ones(2, 9, 3), 4), torch.ones(2, 4, 3))
