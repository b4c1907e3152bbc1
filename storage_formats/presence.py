"""A quick check that every file of an index exists and has the committed length."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.object_store import ObjectFolder
from storage_formats.format.shard_table import FileEntry, read_shard_tables

_PROBLEMS_SHOWN = 3


def check_files(index: CommittedIndex) -> None:
    """Check that every file of the index exists and has the committed length.

    Raises:
        CorruptIndexError: a file is missing or has a wrong length, or a shard table is damaged.
    """
    if problems := list(_problems(index)):
        shown = "; ".join(problems[:_PROBLEMS_SHOWN])
        rest = f"; and {len(problems) - _PROBLEMS_SHOWN} more" if len(problems) > _PROBLEMS_SHOWN else ""
        raise CorruptIndexError(
            f"the index at {index.location} is finished but damaged: {shown}{rest}. {_advice(index)}"
        )


def _advice(index: CommittedIndex) -> str:
    if index.remote is not None:
        return "Copy the index again from a sound copy"
    return (
        f"Run 'edje-index verify {index.location}' to list all damage. Then restore the damaged files. If there is no "
        f"backup, delete {index.location} and build the index again"
    )


def _problems(index: CommittedIndex) -> Iterator[str]:
    layout = Layout(index.root)
    zarr_files = layout.zarr_files(index.manifest.spec.precisions)
    lines = read_shard_tables(index.root, index.manifest.shard_tables)
    files = [*(file for _, file in lines), *index.manifest.ann_files]
    if index.remote is not None:
        yield from _remote_problems(index.remote, map(layout.relative, zarr_files), files)
        return
    for path in zarr_files:
        if not path.is_file():
            yield f"{layout.relative(path)} is missing"
    for file in files:
        try:
            status = os.stat(layout.root / file.path)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            yield f"{file.path} cannot be read: {getattr(error, 'strerror', None) or error}"
            continue
        if not stat.S_ISREG(status.st_mode):
            yield f"{file.path} is not a regular file"
        elif status.st_size != file.bytes:
            yield f"{file.path} has {status.st_size} bytes instead of the {file.bytes} that were committed"


def _remote_problems(folder: ObjectFolder, zarr_keys: Iterable[str], files: Iterable[FileEntry]) -> Iterator[str]:
    sizes = folder.list_sizes()
    yield from (f"{key} is missing" for key in zarr_keys if key not in sizes)
    for file in files:
        if file.path not in sizes:
            yield f"{file.path} is missing"
        elif sizes[file.path] != file.bytes:
            yield f"{file.path} has {sizes[file.path]} bytes instead of the {file.bytes} that were committed"
