"""Finds the tensor of a base tower from which a tensor of a bundle was trained."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edje_index.bundles.info import ADAPTER_WEIGHTS, JOINT_WEIGHTS, VISION_WEIGHTS
from edje_index.errors import ModelError
from edje_index.models.weights import State, read_weights
from edje_index.recipes.base_towers.names import IMAGE_TOWER, TEXT_TOWER, WEIGHTS
from edje_index.recipes.packing.tensors import Array

WEIGHT_FILES = (VISION_WEIGHTS, ADAPTER_WEIGHTS, JOINT_WEIGHTS)
# (file of the bundle, prefix of its tensor names, base tower, prefix of that tower's names)
_PREFIXES = (
    (VISION_WEIGHTS, "visual.trunk.", IMAGE_TOWER, ""),
    (VISION_WEIGHTS, "text.transformer.", TEXT_TOWER, ""),
    (JOINT_WEIGHTS, "language_model.bert.", TEXT_TOWER, ""),
    (JOINT_WEIGHTS, "classification_head.0.", TEXT_TOWER, "pooler."),
)


@dataclass(frozen=True)
class BaseTowers:
    """The weights of the base towers that ``edje-index model fetch-towers`` writes.

    Attributes:
        tensors: weights of the towers, by tower name, then by tensor name.
        digests: SHA-256 of the weights of each tower, by tower name.
    """

    tensors: dict[str, State]
    digests: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> BaseTowers:
        """Read both towers from ``folder``, written by ``fetch_towers``.

        Raises:
            ModelError: a tower is missing.
        """
        tensors = {name: _read(folder / name / WEIGHTS) for name in (IMAGE_TOWER, TEXT_TOWER)}
        return cls(tensors, {name: _digest(state) for name, state in tensors.items()})

    def find(self, file: str, name: str, shape: tuple[int, ...]) -> Array | None:
        """Return the tensor of a base tower from which a tensor of a bundle was trained, float32.

        Args:
            file: weights file of the bundle.
            name: name of the bundle's tensor in ``file``.
            shape: shape of the bundle's tensor.

        Returns:
            The tensor of the base tower. None if no base tower has this tensor with a fitting shape.
        """
        for bundle_file, prefix, tower, tower_prefix in _PREFIXES:
            if file == bundle_file and name.startswith(prefix):
                base = self.tensors[tower].get(tower_prefix + name.removeprefix(prefix))
                if base is not None and base.is_floating_point() and _fits(tuple(base.shape), shape):
                    return np.asarray(base.float().numpy())
        return None


def _fits(base: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if len(base) != len(shape) or not shape:
        return False
    return base == shape or (len(shape) == 2 and base[1:] == shape[1:] and base[0] < shape[0])


def _read(path: Path) -> State:
    if not path.is_file():
        raise ModelError(
            f"there is no base tower at {path}; download both with 'edje-index model fetch-towers {path.parents[1]}'"
        )
    return read_weights(path)


def _digest(state: State) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
