"""Reads and downloads committed files of an index at a URL, and compares them with
their entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage_formats.atomic import replacing
from storage_formats.errors import CorruptIndexError
from storage_formats.format.file_check import FileEntry, checked_pieces
from storage_formats.remote.objects import ObjectFolder

_PARALLEL_DOWNLOADS = 16


def committed_chunks(folder: ObjectFolder, entry: FileEntry) -> Iterator[memoryview]:
    """Yield the contents of the committed file `entry` in pieces.

    Raises:
        CorruptIndexError: the object is missing or too short, or its CRC-32C differs
            from `entry`. The CRC-32C is compared after the last piece was yielded.
    """
    pieces = folder.chunks(entry.path, entry.bytes)
    try:
        yield from checked_pieces(folder.url_of(entry.path), entry, pieces)
    except (FileNotFoundError, EOFError) as error:
        raise CorruptIndexError(
            f"{folder.url_of(entry.path)} is missing or too short; open the index"
            " again. If the error remains, copy the index again from a sound copy"
        ) from error


def download(folder: ObjectFolder, root: Path, entries: Iterable[FileEntry]) -> None:
    """Download those files of `entries` that do not exist below `root`, in parallel."""

    def fetch(entry: FileEntry) -> None:
        path = root / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.writelines(committed_chunks(folder, entry))

    missing = [entry for entry in entries if not (root / entry.path).exists()]
    if missing:
        with ThreadPoolExecutor(min(_PARALLEL_DOWNLOADS, len(missing))) as pool:
            list(pool.map(fetch, missing))
