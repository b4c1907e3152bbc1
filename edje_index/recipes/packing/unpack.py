"""Restores a bundle from a packed model and the base towers. Every machine writes the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from edje_index.bundles.info import BundleInfo, read_bundle_info, verify_files
from edje_index.errors import ModelError
from edje_index.filesystem import new_folder, read_versioned
from edje_index.recipes.packing.bases import WEIGHT_FILES, BaseTowers
from edje_index.recipes.packing.tensors import Array, unpack_tensor

# Stored names: the first release called a packed model a "carried" one.
FORMAT, FORMAT_VERSION = "edje-carried-model", 1
PACKING_FILE, TENSORS_FILE, CARD_FILE = "carried.json", "weights.safetensors", "MODEL_CARD.md"
BUNDLE_FOLDER = "bundle"


@dataclass(frozen=True)
class PackedTensors:
    """The packed tensors of a bundle.

    Attributes:
        arrays: packed arrays of all tensors, by ``<file>:<tensor>:<part>``.
        records: packing and shape of each tensor, by weights file of the bundle, then by tensor name.
    """

    arrays: Mapping[str, Array]
    records: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def parts(self, file: str, name: str) -> dict[str, Array]:
        """Return the packed arrays of the tensor ``name`` in ``file``, by part."""
        prefix = f"{file}:{name}:"
        return {key.removeprefix(prefix): value for key, value in self.arrays.items() if key.startswith(prefix)}


def unpack_model(packed: str | Path, towers: str | Path, out: str | Path) -> BundleInfo:
    """Restore a bundle from a packed model, and return the content of its ``bundle.json``.

    Args:
        packed: folder of the packed model, written by ``pack_model``.
        towers: folder with the base towers, written by ``fetch_towers``.
        out: new folder for the bundle.

    Raises:
        ModelError: ``packed`` is not a packed model or is damaged, ``towers`` contains other base towers than the
            packed model needs, ``out`` exists, or the fingerprint of the restored bundle is wrong.
    """
    folder = Path(packed)
    description, tensors = _read(folder)
    bases = BaseTowers.read(Path(towers))
    if bases.digests != description["towers"]:
        raise ModelError(
            f"{towers} does not contain the base towers of the packed model {folder}; download the base towers "
            "again with 'edje-index model fetch-towers'"
        )
    with new_folder(Path(out)) as staging:
        shutil.copytree(folder / BUNDLE_FOLDER, staging, dirs_exist_ok=True)
        try:
            write_weights(tensors, bases, staging)
        except (KeyError, ValueError, TypeError) as error:
            raise ModelError(f"the packed model {folder} is damaged ({error!r}); copy it again") from error
        verify_files(read_bundle_info(staging))
    return read_bundle_info(out)


def write_weights(tensors: PackedTensors, bases: BaseTowers, folder: Path) -> None:
    """Unpack all tensors, and write the weights files of the bundle in ``folder``."""
    for file, records in tensors.records.items():
        state = {}
        for name, record in records.items():
            shape = tuple(int(n) for n in record["shape"])
            base = bases.find(file, name, shape)
            tensor = unpack_tensor(record["packing"], tensors.parts(file, name), shape=shape, base=base)
            state[name] = np.ascontiguousarray(tensor)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / file)


def _read(folder: Path) -> tuple[dict[str, Any], PackedTensors]:
    description = read_versioned(folder / PACKING_FILE, "packed model", form=FORMAT, versions=[FORMAT_VERSION])
    try:
        tensors = PackedTensors(load_file(folder / TENSORS_FILE), description["tensors"])
        if unknown := set(tensors.records) - set(WEIGHT_FILES):
            raise ModelError(
                f"{folder / PACKING_FILE} lists {min(unknown)!r}, which is not a weights file of a bundle; "
                "copy the packed model again"
            )
        return description, tensors
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(f"cannot read {folder / TENSORS_FILE}: {error}; copy the packed model again") from error
