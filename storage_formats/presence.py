"""A quick check that every file of an index exists and has the committed length."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.shard_table import read_shard_tables

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
    size_of = _size_on_disk(index.root) if index.remote is None else _size_in(index.remote.list_sizes())
    for path in layout.zarr_files(index.manifest.spec.precisions):
        if isinstance(problem := size_of(layout.relative(path)), str):
            yield f"{layout.relative(path)} {problem}"
    lines = read_shard_tables(index.root, index.manifest.shard_tables)
    for file in (*(file for _, file in lines), *index.manifest.ann_files):
        size = size_of(file.path)
        if isinstance(size, str):
            yield f"{file.path} {size}"
        elif size != file.bytes:
            yield f"{file.path} has {size} bytes instead of the {file.bytes} that were committed"


def _size_in(sizes: Mapping[str, int]) -> Callable[[str], int | str]:
    return lambda key: sizes.get(key, "is missing")


def _size_on_disk(root: Path) -> Callable[[str], int | str]:
    def size_of(path: str) -> int | str:
        try:
            status = os.stat(root / path)
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            return f"cannot be read: {getattr(error, 'strerror', None) or error}"
        return status.st_size if stat.S_ISREG(status.st_mode) else "is not a regular file"

    return size_of
