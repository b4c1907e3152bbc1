"""Adapters made from a configuration."""

from __future__ import annotations

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

CONFIG = AdapterConfig(COMPRESSED, num_tokens=3, vision_dim=8, language_dim=6, hidden_dim=10, num_heads=2)
PATCHES = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
RECEIVED = torch.rand(2, 9, generator=torch.Generator().manual_seed(1))


def test_patches_are_stored_untouched_by_an_adapter_without_weights() -> None:
    adapter = build_adapter(AdapterConfig("patches", num_tokens=9, vision_dim=8, language_dim=8, hidden_dim=0))
    assert torch.equal(adapter(PATCHES), PATCHES)
    assert not adapter.state_dict()
    assert adapter.config.is_feature
    with pytest.raises(ModelError, match="hidden_dim of a patches adapter must be 0"):
        build_adapter(replace(adapter.config, hidden_dim=4))


@pytest.mark.parametrize("kind", [STRIDED, CLUSTERED, PRUNED])
def test_training_free_kinds_reduce_then_apply_the_local_layer(kind: str) -> None:
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
        ({"hidden_dim": 0}, "training-free"),
        ({"kind": STRIDED, "hidden_dim": 0}, "training-free"),
    ],
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_adapter(replace(CONFIG, **changes))
