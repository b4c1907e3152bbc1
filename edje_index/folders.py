"""New folders that appear whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edje_index.errors import ModelError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A private folder to fill, which becomes ``out`` when the block ends well and is removed otherwise.

    Raises:
        ModelError: ``out`` exists.
    """
    if out.exists():
        raise ModelError(f"{out} exists already: give another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield staging
        _make_readable(staging)
        staging.rename(out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _make_readable(folder: Path) -> None:
    """Temporary folders and safetensors files begin as the owner's alone; a result is read by others too."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
