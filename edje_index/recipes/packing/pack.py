"""Packs a trained bundle into a folder that is small enough for a Git repository."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from edje_index.bundles.info import INFO_FILE, BundleInfo, describe_bundle, read_bundle_info, verify_files
from edje_index.errors import ModelError
from edje_index.filesystem import new_folder, write_json
from edje_index.recipes.packing.bases import WEIGHT_FILES, BaseTowers
from edje_index.recipes.packing.card import model_card
from edje_index.recipes.packing.tensors import FP16, NEW_TENSOR_PACKINGS, Array, pack_tensor
from edje_index.recipes.packing.unpack import (
    BUNDLE_FOLDER,
    CARD_FILE,
    FORMAT,
    FORMAT_VERSION,
    PACKING_FILE,
    TENSORS_FILE,
    PackedTensors,
    write_weights,
)

MAX_BYTES = 25_000_000


@dataclass(frozen=True)
class PackedModel:
    """A packed model.

    Attributes:
        out: folder of the packed model.
        size: total size of the files in ``out``, in bytes.
        packings: (number of tensors, total size of these tensors in bytes) by name of the packing.
        fingerprint: fingerprint of the bundle that ``unpack_model`` makes.
    """

    out: Path
    size: int
    packings: dict[str, tuple[int, int]]
    fingerprint: str


def pack_model(
    bundle: str | Path, towers: str | Path, out: str | Path, *, new_tensors: str = FP16, max_bytes: int = MAX_BYTES
) -> PackedModel:
    """Pack a bundle into a new folder.

    Args:
        bundle: directory of the bundle. Its towers were trained from the base towers.
        towers: folder with the base towers, written by ``fetch_towers``.
        out: new folder for the packed model.
        new_tensors: packing of large tensors that no base tower has: ``fp16`` or ``int8``.
        max_bytes: maximum size of the packed model in bytes.

    Raises:
        ModelError: ``bundle`` is not a valid bundle, a base tower is missing, ``out`` exists, ``new_tensors`` is not
            ``fp16`` or ``int8``, or the packed model exceeds ``max_bytes``.
    """
    if new_tensors not in NEW_TENSOR_PACKINGS:
        raise ModelError(f"unknown packing {new_tensors!r} of new tensors; use {' or '.join(NEW_TENSOR_PACKINGS)}")
    info = read_bundle_info(bundle)
    verify_files(info)
    bases = BaseTowers.read(Path(towers))
    tensors, packings = _pack_tensors(info, bases, new_tensors)
    with new_folder(Path(out)) as folder:
        save_file(dict(tensors.arrays), folder / TENSORS_FILE)
        write_json(folder / PACKING_FILE, _description(tensors, bases))
        unpacked = _copy_other_files(info, tensors, bases, folder / BUNDLE_FOLDER)
        (folder / CARD_FILE).write_text(model_card(unpacked))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if size > max_bytes:
            raise ModelError(
                f"the packed model takes {size / 1000000.0:.1f} MB, more than the limit of "
                f"{max_bytes / 1000000.0:.1f} MB ({_sizes(packings)}); pack new tensors as int8, or train a "
                "smaller adapter"
            )
    return PackedModel(Path(out), size, packings, unpacked.fingerprint)


def _pack_tensors(
    info: BundleInfo, bases: BaseTowers, new_tensors: str
) -> tuple[PackedTensors, dict[str, tuple[int, int]]]:
    arrays: dict[str, Array] = {}
    records: dict[str, dict[str, dict[str, Any]]] = {}
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file in WEIGHT_FILES:
        records[file] = {}
        for name, tensor in sorted(load_file(info.path / file).items()):
            packing, parts = pack_tensor(tensor, bases.find(file, name, tensor.shape), new_tensors)
            records[file][name] = {"packing": packing, "shape": list(tensor.shape)}
            arrays.update({f"{file}:{name}:{part}": np.ascontiguousarray(value) for part, value in parts.items()})
            totals[packing][0] += 1
            totals[packing][1] += sum(value.nbytes for value in parts.values())
    return PackedTensors(arrays, records), {name: (count, size) for name, (count, size) in sorted(totals.items())}


def _description(tensors: PackedTensors, bases: BaseTowers) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "towers": bases.digests,
        "tensors": tensors.records,
    }


def _copy_other_files(info: BundleInfo, tensors: PackedTensors, bases: BaseTowers, folder: Path) -> BundleInfo:
    """Copy all files except the weights, write a new `bundle.json`, and return the content of `bundle.json`."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "bundle"
        for name in info.files:
            (whole / name).parent.mkdir(parents=True, exist_ok=True)
            if name not in WEIGHT_FILES:
                shutil.copyfile(info.path / name, whole / name)
        write_weights(tensors, bases, whole)
        described = describe_bundle(whole, info)
        write_json(whole / INFO_FILE, described.to_json())
        for name in WEIGHT_FILES:
            (whole / name).unlink(missing_ok=True)
        shutil.copytree(whole, folder)
    return described


def _sizes(packings: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name} {size / 1e6:.1f} MB" for name, (_, size) in packings.items() if size)
