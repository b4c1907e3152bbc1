"""Copying of files from one index to another. If possible, the file system shares the disk blocks (reflink)."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from storage_formats.atomic import naming
from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.checksum import crc32c_file
from storage_formats.format.index_files import open_index_file
from storage_formats.format.shard_table import EXCHANGED, FileEntry

_NOT_SUPPORTED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def copy_file(root: Path, source: FileEntry, target: Path) -> None:
    """Copy a file of the index at `root` to the new file `target`, and compare the copy with the file entry `source`.

    Raises:
        CorruptIndexError: the file is missing, or its length or CRC-32C differs from `source`.
        OSError: `target` cannot be written.
    """
    path = root / source.path
    try:
        opened = open_index_file(root, path)
    except OSError as error:
        raise cannot_read(path, error) from error
    with opened, naming(target), open(target, "xb", buffering=0) as copy:
        length = os.fstat(opened.fileno()).st_size
        if length == source.bytes and not _copy_in_kernel(opened.fileno(), copy.fileno(), length):
            shutil.copyfileobj(opened, copy)
    if crc32c_file(target) != (source.bytes, source.crc32c):
        raise CorruptIndexError(f"{path} is not the file that was committed: {EXCHANGED}")


def _copy_in_kernel(source: int, target: int, length: int) -> bool:
    """Copy `length` bytes between two file descriptors in the kernel. Return False if this is not supported."""
    if not hasattr(os, "copy_file_range"):  # not Linux
        return False
    done = 0
    try:
        while done < length:
            count = os.copy_file_range(source, target, length - done)
            if not count:
                break  # the file became shorter; its checksum will differ
            done += count
    except OSError as error:
        if done or error.errno not in _NOT_SUPPORTED:
            raise
        return False
    return True
