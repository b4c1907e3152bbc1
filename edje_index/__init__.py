"""The EDJE feature index: models, indexing, search, evaluation, and fetching of token blocks.

The names in `__all__` are the public interface. Importing this package imports no heavy libraries. The
first use of a name imports what the name needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.bundles.import_checkpoint import import_checkpoint
    from edje_index.bundles.info import BundleInfo, read_bundle_info
    from edje_index.bundles.published_checkpoint import PublishedModel, load_published_checkpoint
    from edje_index.bundles.random_bundle import create_untrained_bundle
    from edje_index.errors import HubUnreachableError, ModelError
    from edje_index.evaluation.evaluate import evaluate
    from edje_index.evaluation.results import Evaluation, EvaluationConfig
    from edje_index.fetching.device_fetcher import DeviceFetcher
    from edje_index.fetching.token_dataset import TokenDataset
    from edje_index.indexing.faiss_index import add_ann
    from edje_index.indexing.image_encoder import ImageEncoder
    from edje_index.models.joint_encoder import JointEncoder
    from edje_index.models.text_tower import TextTower
    from edje_index.models.vision_tower import VisionTower
    from edje_index.search.client import Client, ServiceError
    from edje_index.search.hits import Hit, Hits, TextHit
    from edje_index.search.late_interaction_search import LateInteractionSearch, TokenHit, max_sim
    from edje_index.search.token_index import TokenIndex
    from storage_formats.extras import MissingExtraError
    from storage_formats.format.rows import read_rows
    from storage_formats.token_store import TokenStore
    from storage_formats.verify import verify_index
    from storage_formats.writing.index_writer import IndexWriter

_MODULES = {
    "BundleInfo": "edje_index.bundles.info",
    "Client": "edje_index.search.client",
    "DeviceFetcher": "edje_index.fetching.device_fetcher",
    "Evaluation": "edje_index.evaluation.results",
    "EvaluationConfig": "edje_index.evaluation.results",
    "Hit": "edje_index.search.hits",
    "Hits": "edje_index.search.hits",
    "HubUnreachableError": "edje_index.errors",
    "ImageEncoder": "edje_index.indexing.image_encoder",
    "IndexWriter": "storage_formats.writing.index_writer",
    "JointEncoder": "edje_index.models.joint_encoder",
    "LateInteractionSearch": "edje_index.search.late_interaction_search",
    "MissingExtraError": "storage_formats.extras",
    "ModelBundle": "edje_index.bundles.bundle",
    "ModelError": "edje_index.errors",
    "PublishedModel": "edje_index.bundles.published_checkpoint",
    "ServiceError": "edje_index.search.client",
    "TextHit": "edje_index.search.hits",
    "TextTower": "edje_index.models.text_tower",
    "TokenDataset": "edje_index.fetching.token_dataset",
    "TokenHit": "edje_index.search.late_interaction_search",
    "TokenIndex": "edje_index.search.token_index",
    "TokenStore": "storage_formats.token_store",
    "VisionTower": "edje_index.models.vision_tower",
    "add_ann": "edje_index.indexing.faiss_index",
    "create_untrained_bundle": "edje_index.bundles.random_bundle",
    "evaluate": "edje_index.evaluation.evaluate",
    "import_checkpoint": "edje_index.bundles.import_checkpoint",
    "load_published_checkpoint": "edje_index.bundles.published_checkpoint",
    "max_sim": "edje_index.search.late_interaction_search",
    "read_bundle_info": "edje_index.bundles.info",
    "read_rows": "storage_formats.format.rows",
    "verify_index": "storage_formats.verify",
}

__all__ = [
    "BundleInfo",
    "Client",
    "DeviceFetcher",
    "Evaluation",
    "EvaluationConfig",
    "Hit",
    "Hits",
    "HubUnreachableError",
    "ImageEncoder",
    "IndexWriter",
    "JointEncoder",
    "LateInteractionSearch",
    "MissingExtraError",
    "ModelBundle",
    "ModelError",
    "PublishedModel",
    "ServiceError",
    "TextHit",
    "TextTower",
    "TokenDataset",
    "TokenHit",
    "TokenIndex",
    "TokenStore",
    "VisionTower",
    "__version__",
    "add_ann",
    "create_untrained_bundle",
    "evaluate",
    "import_checkpoint",
    "load_published_checkpoint",
    "max_sim",
    "read_bundle_info",
    "read_rows",
    "verify_index",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from storage_formats.extras import name_missing_extra

    with name_missing_extra():
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
