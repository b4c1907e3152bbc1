"""The commands that meet faults, their inputs, and what an undisturbed run of them leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from storage_formats import IndexSpec
from tests.conftest import write_random_index
from tests.integration.builds import contents, make_photos

PHOTOS = 16
SPEC = IndexSpec(rows=20, shard_size=8, block_shape=(4, 16), embed_dim=8)


@dataclass(frozen=True)
class Case:
    """A command that writes an index.

    Attributes:
        command: its arguments, without the index.
        index_option: arguments before the index, which follows the command's name if there are none.
        before: index that the command changes; None if it makes a new one.
        contents: what two finished runs must share.
    """

    command: tuple[str, ...]
    index_option: tuple[str, ...]
    before: Path | None
    contents: Callable[[Path], dict[str, Any]]

    def arguments(self, index: Path) -> list[str]:
        """The command for `index`."""
        name, *rest = self.command
        return [name, *self.index_option, str(index), *rest]

    def prepare(self, index: Path) -> None:
        """Put everything at `index` into the state before the command."""
        shutil.rmtree(index, ignore_errors=True)
        if self.before is not None:
            shutil.copytree(self.before, index)


def file_contents(root: Path) -> dict[str, Any]:
    """The bytes of every file."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def make_cases(folder: Path) -> dict[str, Case]:
    """The commands, with inputs in `folder`."""
    make_photos(folder / "photos", PHOTOS)
    create_untrained_bundle(folder / "model", sizes=TINY)
    write_random_index(folder / "before", SPEC, failed=frozenset({3}))
    rng = np.random.default_rng(0)
    for name, shape in {"tokens": SPEC.block_shape, "embeddings": (SPEC.embed_dim,)}.items():
        np.save(folder / f"{name}.npy", rng.standard_normal((SPEC.rows, *shape), dtype=np.float32))
    build = f"build {folder}/photos --model {folder}/model --engine inline --shard-size 8 --batch-size 4 --threads 1"
    arrays = f"import-arrays {folder}/tokens.npy {folder}/embeddings.npy --shard-size 8"
    quantize = "quantize --to fp8 --drop bf16 --engine inline"
    return {
        "build": Case((*build.split(), "--dedupe"), ("--out",), None, contents),
        "import-arrays": Case(tuple(arrays.split()), ("--out",), None, file_contents),
        "quantize": Case(tuple(quantize.split()), (), folder / "before", file_contents),
    }
