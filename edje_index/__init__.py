"""The public Python interface: models, indexing, search, evaluation, and fetching of
token blocks.

`__all__` lists the public names. They include the jobs of `pipelines`, such as
`build_index`, and the errors of `storage_formats`. A name is imported from its module
when it is first used, so importing this package loads no heavy library such as torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle as ModelBundle
    from edje_index.bundles.bundle import (
        write_feature_bundle as write_feature_bundle,
    )
    from edje_index.bundles.import_models import PublishedModel as PublishedModel
    from edje_index.bundles.import_models import import_checkpoint as import_checkpoint
    from edje_index.bundles.import_models import (
        load_published_checkpoint as load_published_checkpoint,
    )
    from edje_index.bundles.info import BundleInfo as BundleInfo
    from edje_index.bundles.info import read_bundle_info as read_bundle_info
    from edje_index.bundles.random_bundle import (
        create_untrained_bundle as create_untrained_bundle,
    )
    from edje_index.errors import HubUnreachableError as HubUnreachableError
    from edje_index.errors import ModelError as ModelError
    from edje_index.evaluation.evaluate import evaluate as evaluate
    from edje_index.fetching.device_fetcher import DeviceFetcher as DeviceFetcher
    from edje_index.fetching.token_dataset import TokenDataset as TokenDataset
    from edje_index.indexing.image_encoder import ImageEncoder as ImageEncoder
    from edje_index.models.joint_encoder import JointEncoder as JointEncoder
    from edje_index.models.text_tower import TextTower as TextTower
    from edje_index.models.vision_tower import VisionTower as VisionTower
    from edje_index.search.client import Client as Client
    from edje_index.search.client import ServiceError as ServiceError
    from edje_index.search.cross_encoder import CrossEncoder as CrossEncoder
    from edje_index.search.duplicates import near_duplicates as near_duplicates
    from edje_index.search.hits import Hit as Hit
    from edje_index.search.hits import Hits as Hits
    from edje_index.search.hits import TextHit as TextHit
    from edje_index.search.late_interaction_search import (
        LateInteractionSearch as LateInteractionSearch,
    )
    from edje_index.search.late_interaction_search import max_sim as max_sim
    from edje_index.search.token_index import TokenIndex as TokenIndex
    from storage_formats.codecs import codec as codec
    from storage_formats.codecs import precisions as precisions
    from storage_formats.errors import CorruptIndexError as CorruptIndexError
    from storage_formats.errors import DeletedRowError as DeletedRowError
    from storage_formats.errors import EdjeError as EdjeError
    from storage_formats.errors import IncompleteIndexError as IncompleteIndexError
    from storage_formats.errors import RowIdError as RowIdError
    from storage_formats.errors import UsageError as UsageError
    from storage_formats.extras import MissingExtraError as MissingExtraError
    from storage_formats.format.rows import read_rows as read_rows
    from storage_formats.token_store import TokenStore as TokenStore
    from storage_formats.verify import verify_index as verify_index
    from storage_formats.writing.index_writer import IndexWriter as IndexWriter

# The public names, by the module that defines them. Spaces separate the names from
# one module.
_NAMES = {
    "edje_index.bundles.bundle": "ModelBundle write_feature_bundle",
    "edje_index.bundles.info": "BundleInfo read_bundle_info",
    "edje_index.bundles.import_models": (
        "PublishedModel import_checkpoint load_published_checkpoint"
    ),
    "edje_index.bundles.random_bundle": "create_untrained_bundle",
    "edje_index.errors": "HubUnreachableError ModelError",
    "edje_index.evaluation.evaluate": "evaluate",
    "edje_index.fetching.device_fetcher": "DeviceFetcher",
    "edje_index.fetching.token_dataset": "TokenDataset",
    "edje_index.indexing.image_encoder": "ImageEncoder",
    "edje_index.models.joint_encoder": "JointEncoder",
    "edje_index.models.text_tower": "TextTower",
    "edje_index.models.vision_tower": "VisionTower",
    "edje_index.search.client": "Client ServiceError",
    "edje_index.search.cross_encoder": "CrossEncoder",
    "edje_index.search.duplicates": "near_duplicates",
    "edje_index.search.hits": "Hit Hits TextHit",
    "edje_index.search.late_interaction_search": "LateInteractionSearch max_sim",
    "edje_index.search.token_index": "TokenIndex",
    "storage_formats.codecs": "codec precisions",
    "storage_formats.errors": (
        "CorruptIndexError DeletedRowError EdjeError IncompleteIndexError RowIdError"
        " UsageError"
    ),
    "storage_formats.extras": "MissingExtraError",
    "storage_formats.format.rows": "read_rows",
    "storage_formats.token_store": "TokenStore",
    "storage_formats.verify": "verify_index",
    "storage_formats.writing.index_writer": "IndexWriter",
    "pipelines.jobs.build": "BuildResult build_index",
    "pipelines.jobs.copy": "CopyResult compact_index copy_index merge_indexes",
    "pipelines.jobs.quantize": "QuantizeResult add_ann quantize_index",
    "pipelines.jobs.repair": "RepairResult repair_index",
    "pipelines.jobs.snapshots": "DeleteResult delete_rows set_columns",
    "pipelines.jobs.training.run": "TrainResult train",
    "pipelines.jobs.update": "add_images append_index update_index",
    "pipelines.progress.events": "JobStopped",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from storage_formats.extras import name_missing_extra
    from storage_formats.launch import share_package

    is_job = _MODULES[name].startswith("pipelines.")
    with name_missing_extra("build" if is_job else ""):
        if is_job:
            # Another installed package can also be called `pipelines`. Without this
            # call, Python would then search only that package for the jobs.
            share_package()
        return getattr(importlib.import_module(_MODULES[name]), name)


# `dir(edje_index)` also lists names that are not imported yet.
__dir__ = __all__.copy
