"""Finds the model bundle that built an index, without loading torch."""

from __future__ import annotations

from pathlib import Path

from edje_index.bundles.info import BundleInfo, read_bundle_info
from edje_index.errors import BundleNotFoundError, ModelError
from storage_formats.arguments import as_path
from storage_formats.format.manifest import CommittedIndex


def recorded_bundle(index: CommittedIndex) -> Path:
    """Return the path of the bundle that built `index`, as recorded in the index.

    Relative paths are refused, because they could lead to a bundle from another author. `build` records absolute paths.

    Raises:
        ModelError: the index was not built with a model bundle.
        BundleNotFoundError: the recorded path is relative, or does not exist.
    """
    if "bundle" not in index.manifest.model:
        raise ModelError(
            f"{index.root} was written from arrays and has no text tower: use edje_index.LateInteractionSearch"
        )
    path = Path(index.manifest.model["bundle"])
    if not path.is_absolute():
        raise BundleNotFoundError(
            f"{index.root} names its model bundle by the relative path {str(path)!r}, which is not safe "
            "to follow: give the path of the bundle that built the index"
        )
    if not path.exists():
        raise BundleNotFoundError(
            f"the model bundle {path}, which built {index.root}, no longer exists: give the current path of this bundle"
        )
    return path


def matching_bundle(index: CommittedIndex, model: str | Path | None = None) -> BundleInfo:
    """Check that a bundle built `index`, and return the content of its ``bundle.json``.

    Args:
        index: index to check.
        model: directory of the bundle. None means the path recorded in the index, see `recorded_bundle`.

    Raises:
        ModelError: the bundle is missing, or the bundle did not build the index.
    """
    path = recorded_bundle(index) if model is None else as_path(model, "model")
    info = read_bundle_info(path)
    built_by = index.manifest.model["fingerprint"]
    if info.encoder_fingerprint != built_by:
        raise ModelError(
            f"the bundle {path} did not build {index.root}, because the encoder fingerprint of the bundle is "
            f"{info.encoder_fingerprint} instead of {built_by}: give the bundle that built the index"
        )
    return info
