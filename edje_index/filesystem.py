"""Small JSON files, and folders that appear whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edje_index.errors import ModelError


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON for machines and people: sorted keys, indented, a newline at the end."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_versioned(folder: Path, name: str, what: str, form: str, version: int) -> dict[str, Any]:
    """The JSON object that a folder says of itself in its file `name`, its `format` being `form`.

    Raises:
        ModelError: no such file, something else in it, or another `format_version`; `what` the folder should be is
            named.
    """
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelError(f"{folder} is not a {what}: it holds no {name}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != form:
        raise ModelError(f"{path} does not describe a {what}")
    if content.get("format_version") != version:
        raise ModelError(
            f"the {what} {folder} has format version {content.get('format_version')}; this program reads version "
            f"{version}: use a matching release, or make it anew"
        )
    return content


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
