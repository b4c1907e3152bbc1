"""EDJE feature index: frozen vision tower, token adapter, joint encoder, and search over an index.

Importing this package loads none of torch, FAISS, PyArrow or Zarr: each name below is loaded when it
is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.bundles.info import BundleInfo, read_bundle_info
    from edje_index.bundles.published_checkpoint import PublishedModel, load_published_checkpoint
    from edje_index.bundles.random_bundle import create_untrained_bundle
    from edje_index.errors import HubUnreachableError, ModelError
    from edje_index.indexing.faiss_index import add_ann
    from edje_index.indexing.image_encoder import ImageEncoder
    from edje_index.models.joint_encoder import JointEncoder
    from edje_index.models.text_tower import TextTower
    from edje_index.models.vision_tower import VisionTower
    from edje_index.search.late_interaction_search import LateInteractionSearch, TokenHit, max_sim
    from edje_index.search.token_index import TokenIndex
    from storage_formats.writing.index_writer import IndexWriter

_MODULES = {
    "IndexWriter": "storage_formats.writing.index_writer",
    "LateInteractionSearch": "edje_index.search.late_interaction_search",
    "TokenHit": "edje_index.search.late_interaction_search",
    "add_ann": "edje_index.indexing.faiss_index",
    "max_sim": "edje_index.search.late_interaction_search",
    "BundleInfo": "edje_index.bundles.info",
    "HubUnreachableError": "edje_index.errors",
    "ImageEncoder": "edje_index.indexing.image_encoder",
    "JointEncoder": "edje_index.models.joint_encoder",
    "ModelBundle": "edje_index.bundles.bundle",
    "ModelError": "edje_index.errors",
    "PublishedModel": "edje_index.bundles.published_checkpoint",
    "TextTower": "edje_index.models.text_tower",
    "TokenIndex": "edje_index.search.token_index",
    "VisionTower": "edje_index.models.vision_tower",
    "create_untrained_bundle": "edje_index.bundles.random_bundle",
    "load_published_checkpoint": "edje_index.bundles.published_checkpoint",
    "read_bundle_info": "edje_index.bundles.info",
}

__all__ = [
    "BundleInfo",
    "HubUnreachableError",
    "ImageEncoder",
    "IndexWriter",
    "JointEncoder",
    "LateInteractionSearch",
    "ModelBundle",
    "ModelError",
    "PublishedModel",
    "TextTower",
    "TokenHit",
    "TokenIndex",
    "VisionTower",
    "__version__",
    "add_ann",
    "create_untrained_bundle",
    "load_published_checkpoint",
    "max_sim",
    "read_bundle_info",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edje_index.errors import name_missing_extra

    with name_missing_extra():
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
