"""Durable writes: flush to the device, rename into place, flush the folder."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def fsync_path(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_paths(paths: Iterable[Path]) -> None:
    """Flush each distinct file or folder once, side by side: a journalling file system then commits them together."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fsync_path, set(paths)))


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a crash leaves the old file or the new one, whole.

    The parent folder is made where it is missing. Raises OSError as the operating system gives it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_path(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """`write_bytes_atomic` of `value` as JSON: sorted keys, two spaces, UTF-8."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_bytes_atomic(path, text.encode())
