"""The commands that meet faults, their inputs, and what every finished run of them shares."""

from __future__ import annotations

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
    """A command that writes or changes an index.

    Attributes:
        command: its words, with INDEX for the index.
        contents: what two finished runs must share.
        before: the index that it changes; None if it makes a new one.
        refuses_finished: whether it refuses a finished index instead of doing nothing.
    """

    command: str
    contents: Callable[[Path], dict[str, Any]]
    before: Path | None = None
    refuses_finished: bool = False

    def arguments(self, index: Path) -> list[str]:
        """The arguments of the command for `index`."""
        return [str(index) if word == "INDEX" else word for word in self.command.split()]

    def prepare(self, index: Path) -> None:
        """Restore the state before the command."""
        shutil.rmtree(index, ignore_errors=True)
        if self.before is not None:
            shutil.copytree(self.before, index)


def file_contents(root: Path) -> dict[str, Any]:
    """The bytes of every file except those in `build/`."""
    files = (path for path in root.rglob("*") if path.is_file())
    names = {path.relative_to(root): path for path in files}
    return {str(name): path.read_bytes() for name, path in names.items() if name.parts[0] != "build"}


def make_cases(folder: Path) -> dict[str, Case]:
    """The commands by name, with inputs in `folder`, whose path has no space."""
    make_photos(folder / "photos", PHOTOS)
    create_untrained_bundle(folder / "model", sizes=TINY)
    write_random_index(folder / "before", SPEC, failed=frozenset({3}))
    rng = np.random.default_rng(0)
    for name, shape in {"tokens": SPEC.block_shape, "embeddings": (SPEC.embed_dim,)}.items():
        np.save(folder / f"{name}.npy", rng.standard_normal((SPEC.rows, *shape), dtype=np.float32))
    build = f"build {folder}/photos --model {folder}/model --out INDEX --engine inline --threads 1"
    arrays = f"import-arrays {folder}/tokens.npy {folder}/embeddings.npy --out INDEX --shard-size 8"
    return {
        "build": Case(f"{build} --shard-size 8 --batch-size 4 --dedupe", contents),
        "import-arrays": Case(arrays, file_contents, refuses_finished=True),
        "quantize": Case("quantize INDEX --to fp8 --drop bf16", file_contents, folder / "before"),
    }
