"""Durable writes. A new file is flushed to the device and renamed into place, and then
its directory is flushed.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from storage_formats.system_calls import MissingCallError, promised
from storage_formats.threads import run_threads

Json: TypeAlias = dict[str, Any]
"""A JSON object."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager that sets the file name of an OSError to `path` if the error has
    no file name. Errors of calls on an open file, such as `write`, have none.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def fsync_path(path: Path) -> None:
    """Call fsync on a file or a directory. If the file system cannot flush directories,
    no error is raised for a directory. The kernel then writes it to the device later.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        with promised("fsync", path):
            os.fsync(fd)
    except MissingCallError:
        if not path.is_dir():
            raise
    finally:
        os.close(fd)


def fsync_paths(paths: Iterable[Path]) -> None:
    """Call `fsync_path` once for each distinct path, in parallel."""
    # A journalling file system can commit parallel flushes together.
    distinct = list(set(paths))
    run_threads(fsync_path, distinct, min(8, len(distinct)))


def make_directories(path: Path) -> None:
    """Create a directory and all missing parent directories, and call fsync on the
    new directories.
    """
    missing = [
        directory for directory in (path, *path.parents) if not directory.exists()
    ]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        fsync_parent(directory)


def fsync_parent(path: Path) -> None:
    """Call fsync on the parent directory of `path`. Does nothing if the user may
    not read that directory.
    """
    with contextlib.suppress(PermissionError):
        fsync_path(path.absolute().parent)


def write_bytes_atomic(path: Path, data: bytes, staging: Path | None = None) -> None:
    """Write `data` to the file at `path`, and replace the file if it exists. For
    `staging`, see `private_path`.

    After a crash, the file has either the old or the new contents. Missing parent
    directories are created.
    """
    make_directories(path.parent)
    with replacing(path, staging) as file:
        file.write(data)
    fsync_path(path.parent)


def private_path(path: Path, staging: Path | None = None) -> Path:
    """Return a new path for contents that are renamed to `path` when they are complete.

    Args:
        staging: directory of the private file, which is created; None for the directory
            of `path`. Files of an index are written in `build/staging/`: if the process
            is killed, the next change of the index or the removal of garbage removes
            them.
    """
    if staging is None:
        staging = path.parent
    staging.mkdir(parents=True, exist_ok=True)
    return staging / f".{path.name}.{uuid.uuid4().hex}"


@contextlib.contextmanager
def replacing(path: Path, staging: Path | None = None) -> Iterator[BinaryIO]:
    """Context manager that yields a new file, which replaces the file at `path` unless
    an exception ends the block. For `staging`, see `private_path`.

    The contents are flushed to the device; the directory is not.
    """
    temporary = private_path(path, staging)
    try:
        with naming(path), open(temporary, "xb") as file:
            yield file
            file.flush()
            with promised("fsync", path):
                os.fsync(file.fileno())
        with promised("rename", path):
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return `value` as JSON in UTF-8, with sorted keys and one line per member."""
    # The argument `indent` would select the encoder that is written in Python, which
    # takes ten times as long as the one in C.
    members = (
        json.dumps({name: value[name]}, sort_keys=True, ensure_ascii=False)[1:-1]
        for name in sorted(value)
    )
    text = "{\n  " + ",\n  ".join(members) + "\n}\n"
    # Python represents a path that is not UTF-8 with lone surrogates, which UTF-8
    # cannot encode. "backslashreplace" writes them as JSON escapes.
    return text.encode(errors="backslashreplace")
