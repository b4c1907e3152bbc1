"""Which part of an adapter is trained."""

from __future__ import annotations

from torch import nn

from edje_index.models.adapter import Adapter, ReducedAdapter


def trained_part(adapter: Adapter) -> nn.Module:
    """The part of an adapter that is trained: only the MLP if features are reduced when they are stored."""
    return adapter.local if isinstance(adapter, ReducedAdapter) else adapter
