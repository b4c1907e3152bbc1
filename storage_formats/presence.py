"""A quick check of an index: every file is there with its committed length. No data file is read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from storage_formats.format.layout import Layout
from storage_formats.format.manifest import FileEntry, Manifest
from storage_formats.format.zarr_metadata import zarr_documents
from storage_formats.verify import Problem


def find_missing_files(root: str | Path, manifest: Manifest) -> Iterator[Problem]:
    """Files of the index that are missing or differ in length from the committed ones.

    Raises:
        CorruptIndexError: the shard table is missing or damaged.
    """
    layout = Layout(Path(root))
    for path in zarr_documents(layout, manifest.spec):
        if not path.is_file():
            yield Problem(layout.relative(path), "missing-file", "is missing")
    shard_files = manifest.shard_files(root)
    for path, length in zip(shard_files["path"].to_pylist(), shard_files["bytes"].to_pylist(), strict=True):
        yield from _check_length(layout, path, length)
    for value in manifest.ann.get("files", []):
        entry = FileEntry.from_json(value)
        yield from _check_length(layout, entry.path, entry.bytes)


def _check_length(layout: Layout, path: str, length: int) -> Iterator[Problem]:
    try:
        status = os.stat(layout.root / path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        yield Problem(path, "missing-file", f"cannot be read: {reason}")
        return
    if not stat.S_ISREG(status.st_mode):
        yield Problem(path, "missing-file", "is not a regular file")
    elif status.st_size != length:
        yield Problem(path, "length", f"has {status.st_size} bytes instead of the {length} that were committed")
