"""EDJE feature index: frozen vision tower, token adapter, joint encoder, and search over an index.

Importing this package loads none of torch, FAISS, PyArrow or Zarr: each name below is loaded when it
is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from edje_index.bundle import ModelBundle
    from edje_index.bundle_info import BundleInfo, read_bundle_info
    from edje_index.encoder import ImageEncoder
    from edje_index.errors import HubUnreachableError, ModelError
    from edje_index.joint_encoder import JointEncoder
    from edje_index.published import PublishedModel, load_published_checkpoint
    from edje_index.retrieval import TokenIndex
    from edje_index.text import TextTower
    from edje_index.untrained import create_untrained_bundle
    from edje_index.vision import VisionTower

_MODULES = {
    "BundleInfo": "bundle_info",
    "HubUnreachableError": "errors",
    "ImageEncoder": "encoder",
    "JointEncoder": "joint_encoder",
    "ModelBundle": "bundle",
    "ModelError": "errors",
    "PublishedModel": "published",
    "TextTower": "text",
    "TokenIndex": "retrieval",
    "VisionTower": "vision",
    "create_untrained_bundle": "untrained",
    "load_published_checkpoint": "published",
    "read_bundle_info": "bundle_info",
}

__all__ = [
    "BundleInfo",
    "HubUnreachableError",
    "ImageEncoder",
    "JointEncoder",
    "ModelBundle",
    "ModelError",
    "PublishedModel",
    "TextTower",
    "TokenIndex",
    "VisionTower",
    "__version__",
    "create_untrained_bundle",
    "load_published_checkpoint",
    "read_bundle_info",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
