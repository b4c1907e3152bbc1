"""Selects the part of an adapter that is trained."""

from __future__ import annotations

from torch import nn

from edje_index.models.adapter import Adapter, ReducedAdapter


def trained_part(adapter: Adapter) -> nn.Module:
    """Return the module of `adapter` that is trained.

    For an adapter that reduces patches, this module is the MLP, because training reads reduced features. For any other
    adapter, it is the whole adapter.
    """
    return adapter.local if isinstance(adapter, ReducedAdapter) else adapter
