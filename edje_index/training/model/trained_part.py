"""Selects the part of an adapter that is trained."""

from __future__ import annotations

from torch import nn

from edje_index.models.adapter import Adapter, ReducedAdapter


def trained_part(adapter: Adapter) -> nn.Module:
    """Return the trainable module of `adapter`.

    For an adapter that reduces patches this is only the MLP, because the stored features are already reduced.
    """
    return adapter.local if isinstance(adapter, ReducedAdapter) else adapter
