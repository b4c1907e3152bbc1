"""From a trained bundle to the folder that a repository carries."""

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
from edje_index.recipes.packing.tensors import FP16, FRESH, Array, pack
from edje_index.recipes.packing.unpack import (
    BUNDLE_FOLDER,
    CARD_FILE,
    CARRIED_FILE,
    FORMAT,
    FORMAT_VERSION,
    PACKED_FILE,
    Packed,
    write_weights,
)

MAX_BYTES = 25_000_000


@dataclass(frozen=True)
class CarriedModel:
    """What was packed.

    Attributes:
        out: its folder.
        size: bytes of the whole folder.
        packings: way of packing to (tensors, bytes).
        fingerprint: of the bundle that ``assemble_bundle`` makes of it.
    """

    out: Path
    size: int
    packings: dict[str, tuple[int, int]]
    fingerprint: str


def carry_model(
    bundle: str | Path, towers: str | Path, out: str | Path, *, fresh: str = FP16, max_bytes: int = MAX_BYTES
) -> CarriedModel:
    """Pack a bundle into the new folder ``out``.

    Args:
        bundle: a bundle whose towers began as the base towers.
        towers: folder of ``fetch_towers``.
        out: new folder.
        fresh: ``fp16`` or ``int8`` for large tensors that no tower has.
        max_bytes: larger folders are refused.

    Raises:
        ModelError: not a sound bundle, no towers, ``out`` exists, or more than ``max_bytes``.
    """
    if fresh not in FRESH:
        raise ModelError(f"large new tensors are packed as one of {', '.join(FRESH)}, not {fresh!r}")
    info = read_bundle_info(bundle)
    verify_files(info)
    bases = BaseTowers.read(Path(towers))
    packed, packings = _packed(info, bases, fresh)
    with new_folder(Path(out)) as folder:
        save_file(dict(packed.arrays), folder / PACKED_FILE)
        write_json(folder / CARRIED_FILE, _account(packed, bases))
        assembled = _copy_rest(info, packed, bases, folder / BUNDLE_FOLDER)
        (folder / CARD_FILE).write_text(model_card(assembled))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if size > max_bytes:
            raise ModelError(
                f"the packed model takes {size / 1e6:.1f} MB, more than {max_bytes / 1e6:.1f} MB "
                f"({_largest(packings)}): pack new tensors as int8, train a narrower adapter, or freeze the words"
            )
    return CarriedModel(Path(out), size, packings, assembled.fingerprint)


def _packed(info: BundleInfo, bases: BaseTowers, fresh: str) -> tuple[Packed, dict[str, tuple[int, int]]]:
    arrays: dict[str, Array] = {}
    index: dict[str, dict[str, dict[str, Any]]] = {}
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file in WEIGHT_FILES:
        index[file] = {}
        for name, tensor in sorted(load_file(info.path / file).items()):
            packing, parts = pack(tensor, bases.find(file, name, tensor.shape), fresh)
            index[file][name] = {"packing": packing, "shape": list(tensor.shape)}
            arrays.update({f"{file}:{name}:{part}": np.ascontiguousarray(value) for part, value in parts.items()})
            totals[packing][0] += 1
            totals[packing][1] += sum(value.nbytes for value in parts.values())
    return Packed(arrays, index), {name: (count, size) for name, (count, size) in sorted(totals.items())}


def _account(packed: Packed, bases: BaseTowers) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "towers": bases.digests,
        "tensors": packed.index,
    }


def _copy_rest(info: BundleInfo, packed: Packed, bases: BaseTowers, folder: Path) -> BundleInfo:
    """Files without weights, and ``bundle.json`` of the bundle that will be assembled."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "bundle"
        for name in info.files:
            (whole / name).parent.mkdir(parents=True, exist_ok=True)
            if name not in WEIGHT_FILES:
                shutil.copyfile(info.path / name, whole / name)
        write_weights(packed, bases, whole)
        described = describe_bundle(
            whole,
            vision=info.vision,
            adapter=info.adapter,
            joint=info.joint,
            trained=info.trained,
            notes=info.notes,
        )
        write_json(whole / INFO_FILE, described.to_json())
        for name in WEIGHT_FILES:
            (whole / name).unlink(missing_ok=True)
        shutil.copytree(whole, folder)
    return described


def _largest(packings: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name} {size / 1e6:.1f} MB" for name, (_, size) in packings.items() if size)
