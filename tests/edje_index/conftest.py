"""Prepares torchvision before any test module imports open_clip, timm or transformers, which import it."""

from __future__ import annotations

from edje_index.models._torchvision_compat import prepare_torchvision

prepare_torchvision()
