"""Inputs that are whole files."""

from __future__ import annotations

import os
import stat

from edje_index.images.decode import HEAD_BYTES
from edje_index.images.inputs import InputRef, display_path
from edje_index.images.remote.access import read_remote_range, remote_version, require_libraries
from edje_index.images.remote.errors import ChangedFileError
from edje_index.images.remote.urls import is_remote
from edje_index.images.transient import TransientInputError, is_transient, transient_error


def file_input(path: bytes, uri: str | None = None) -> InputRef:
    """Return an input for the file at `path`.

    The input has a `problem` if the file is missing, unreadable or not a regular file.

    Args:
        path: path of the file, or its URL. No request is sent for a URL.
        uri: uri of the input; None derives the uri from `path`.
    """
    uri = display_path(path) if uri is None else uri
    if is_remote(path):
        require_libraries(os.fsdecode(path))
        return InputRef(uri, path)
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        return InputRef(uri, path, problem=problem_of(error))
    if not stat.S_ISREG(status.st_mode):
        return InputRef(uri, path, problem="unreadable")
    return InputRef(uri, path, size=status.st_size)


def problem_of(error: Exception) -> str:
    """Return the `problem` of an input that could not be read because of `error`.

    Raises:
        TransientInputError: the error has a temporary reason, so a later attempt may succeed.
    """
    if isinstance(error, ChangedFileError):
        raise TransientInputError(f"{error.filename} has changed while it was listed; run the command again") from error
    if isinstance(error, OSError) and is_transient(error):
        raise transient_error(display_path(os.fsencode(error.filename or "a source")), error) from error
    return "missing" if isinstance(error, FileNotFoundError | NotADirectoryError) else "unreadable"


def read_head(path: bytes) -> bytes:
    """Return the first `HEAD_BYTES` bytes of a regular file or a URL. Raises OSError if the file cannot be read."""
    if is_remote(path):
        url = os.fsdecode(path)
        version = remote_version(url)
        return read_remote_range(url, min(HEAD_BYTES, version.length), 0, version=version) if version.length else b""
    with open(path, "rb", buffering=0) as file:
        return file.read(HEAD_BYTES)
