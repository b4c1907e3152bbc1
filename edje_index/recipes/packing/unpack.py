"""From a carried folder and the base towers to an ordinary bundle, the same bytes wherever it is made."""

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
from edje_index.recipes.packing.bases import BaseTowers
from edje_index.recipes.packing.tensors import Array, unpack

FORMAT, FORMAT_VERSION = "edje-carried-model", 1
CARRIED_FILE, PACKED_FILE, CARD_FILE = "carried.json", "weights.safetensors", "MODEL_CARD.md"
BUNDLE_FOLDER = "bundle"


@dataclass(frozen=True)
class Packed:
    """The packed tensors of a bundle.

    Attributes:
        arrays: ``<file>:<tensor>:<part>`` to array.
        index: file of the bundle to tensor to ``{"packing", "shape"}``.
    """

    arrays: Mapping[str, Array]
    index: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def parts(self, file: str, name: str) -> dict[str, Array]:
        """The arrays of one tensor."""
        prefix = f"{file}:{name}:"
        return {key.removeprefix(prefix): value for key, value in self.arrays.items() if key.startswith(prefix)}


def assemble_bundle(carried: str | Path, towers: str | Path, out: str | Path) -> BundleInfo:
    """Write the bundle that a carried folder stands for as the new folder ``out``.

    Args:
        carried: what ``carry_model`` wrote.
        towers: folder of ``fetch_towers``.
        out: new folder.

    Raises:
        ModelError: not such a folder, other towers than it was packed with, ``out`` exists, or files that do not come
            to the recorded fingerprint.
    """
    folder = Path(carried)
    account, packed = _read(folder)
    bases = BaseTowers.read(Path(towers))
    if bases.digests != account["towers"]:
        raise ModelError(
            f"{folder} was packed with other base towers than those in {towers}: "
            "get them with 'edje-index fetch-towers'"
        )
    with new_folder(Path(out)) as staging:
        shutil.copytree(folder / BUNDLE_FOLDER, staging, dirs_exist_ok=True)
        try:
            write_weights(packed, bases, staging)
        except (KeyError, ValueError, TypeError) as error:
            raise ModelError(f"{folder} is damaged ({error!r}): copy the whole folder again") from error
        verify_files(read_bundle_info(staging))
    return read_bundle_info(out)


def write_weights(packed: Packed, bases: BaseTowers, folder: Path) -> None:
    """Unpack every tensor into the bundle's files of weights."""
    for file, tensors in packed.index.items():
        state = {}
        for name, record in tensors.items():
            shape = tuple(int(n) for n in record["shape"])
            base = bases.find(file, name, shape)
            state[name] = np.ascontiguousarray(unpack(record["packing"], packed.parts(file, name), shape, base))
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / file)


def _read(folder: Path) -> tuple[dict[str, Any], Packed]:
    account = read_versioned(folder, CARRIED_FILE, "carried model", FORMAT, FORMAT_VERSION)
    try:
        return account, Packed(load_file(folder / PACKED_FILE), account["tensors"])
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(f"cannot read {folder / PACKED_FILE}: {error}; copy the whole folder again") from error
