"""The contents of a directory on a remote server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteFile:
    """A file in a remote directory: its name, and its number of bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Folder:
    """The files in a remote directory, and the names of its subdirectories."""

    files: Sequence[RemoteFile]
    directories: Sequence[str]
