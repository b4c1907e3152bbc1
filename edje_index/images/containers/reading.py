"""Reads inputs from containers: zips, compressed tars and Parquet files.

Each process keeps a few containers open, because opening a container can take long.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TypeAlias

from edje_index.images.archive_damage import ArchiveDamage
from edje_index.images.containers.compressed import DecompressedFile
from edje_index.images.containers.container import PARQUET, ZIP, Container
from edje_index.images.containers.parquet_images import ParquetImages
from edje_index.images.containers.zips import ZipArchive
from edje_index.images.decode import ImageError
from edje_index.images.ranges import open_ranged
from edje_index.images.remote.urls import is_remote

_MAX_OPEN = 8
_OPENING = threading.Lock()

_Opened: TypeAlias = DecompressedFile | ZipArchive | ParquetImages


def read_packed(path: bytes, container: Container, offset: int, *, size: int | None, max_bytes: int) -> bytes:
    """Return the bytes of an input in a container.

    Args:
        path: path or URL of the container.
        container: how the file packs its inputs.
        offset: position of the input, see `InputRef`.
        size: number of bytes of the input when the plan was made; None if unknown.
        max_bytes: largest number of bytes of an input.

    Raises:
        ImageError: the container has changed or is damaged, or the input is too large.
        OSError: the container cannot be read.
    """
    if (size or 0) > max_bytes:
        raise ImageError(reason="too-many-bytes", detail=f"{size} bytes is over the limit of {max_bytes}")
    try:
        modified = None if is_remote(path) else os.stat(path).st_mtime_ns
        with _OPENING:
            opened = _open(path, container, modified, os.getpid())  # a forked process lacks the threads of its parent
        if isinstance(opened, DecompressedFile):
            data = opened.pread(size or 0, offset)
        else:
            data = opened.read(offset, max_bytes)
    except ArchiveDamage as damage:
        raise ImageError(reason=damage.reason, detail=damage.detail) from damage
    except OSError:
        _open.cache_clear()  # a broken connection must not stay
        raise
    if size is not None and len(data) != size:
        raise ImageError(reason="truncated-archive", detail=f"the archive has only {len(data)} of {size} bytes")
    return data


@functools.lru_cache(_MAX_OPEN)
def _open(path: bytes, container: Container, _modified: int | None, _process: int) -> _Opened:
    file = open_ranged(path)
    if file.length != container.length:
        raise ImageError(reason="changed-since-plan", detail=f"the file has {file.length} bytes now")
    if container.kind == ZIP:
        return ZipArchive(file)
    if container.kind == PARQUET:
        return ParquetImages(file, container.column)
    return DecompressedFile(file, container.kind)
