"""Writes JSON files, and creates folders atomically."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edje_index.errors import ModelError
from storage_formats.atomic import Json


def write_json(path: Path, content: Json) -> None:
    """Write `content` to `path` as indented JSON with sorted keys."""
    path.write_text(
        json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def check_new(out: str | Path) -> None:
    """Raise ModelError if `out` exists."""
    if Path(out).exists():
        raise ModelError(
            f"{out} exists already: give another directory, or remove {out}"
        )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Context manager that creates the folder ``out``, which must not exist.

    The `with` block writes to a temporary folder, which is renamed to ``out`` at the
    end of the block. If the block raises an exception, the temporary folder is removed.

    Raises:
        ModelError: ``out`` exists, or another process has created it meanwhile.
    """
    check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield staging
        # Only the owner can read temporary folders and safetensors files. These
        # permissions let all users read the new folder.
        for path in (staging, *staging.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            staging.rename(out)
        except OSError:
            check_new(out)
            raise
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
