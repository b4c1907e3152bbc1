"""Which tensor of which base tower a tensor of a bundle began as."""

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
# Names in a file of the bundle that begin so are those of a tower with another beginning.
_PREFIXES = (
    (VISION_WEIGHTS, "visual.trunk.", IMAGE_TOWER, ""),
    (VISION_WEIGHTS, "text.transformer.", TEXT_TOWER, ""),
    (JOINT_WEIGHTS, "language_model.bert.", TEXT_TOWER, ""),
    (JOINT_WEIGHTS, "classification_head.0.", TEXT_TOWER, "pooler."),
)


@dataclass(frozen=True)
class BaseTowers:
    """The towers of ``edje-index fetch-towers``.

    Attributes:
        tensors: by tower and name.
        digests: SHA-256 over the tensors of each tower.
    """

    tensors: dict[str, State]
    digests: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> BaseTowers:
        """From the folder that holds both. ModelError where one is missing."""
        tensors = {name: _read(folder / name / WEIGHTS) for name in (IMAGE_TOWER, TEXT_TOWER)}
        return cls(tensors, {name: _digest(state) for name, state in tensors.items()})

    def find(self, file: str, name: str, shape: tuple[int, ...]) -> Array | None:
        """The base of tensor ``name`` in a bundle's ``file``, as float32; None where it has none of a fitting shape."""
        for of_file, prefix, tower, other in _PREFIXES:
            if file == of_file and name.startswith(prefix):
                base = self.tensors[tower].get(other + name.removeprefix(prefix))
                if base is not None and base.is_floating_point() and _fits(tuple(base.shape), shape):
                    return np.asarray(base.float().numpy())
        return None


def _fits(base: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Equal but for rows that were added; a vector or a position table has none."""
    if len(base) != len(shape) or not shape:
        return False
    return base == shape or (len(shape) == 2 and base[1:] == shape[1:] and base[0] < shape[0])


def _read(path: Path) -> State:
    if not path.is_file():
        raise ModelError(f"no base tower at {path}: 'edje-index fetch-towers {path.parents[1]}' gets both")
    return read_weights(path)


def _digest(state: State) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
