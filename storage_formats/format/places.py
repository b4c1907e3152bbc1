"""The places where an index can lie: a directory, or a prefix of an object store. All
changes of an index write and remove files through a `Place`.
"""

from __future__ import annotations

from storage_formats.arguments import as_path
from storage_formats.format.directory import Directory
from storage_formats.format.place import Place
from storage_formats.format.prefix import Prefix
from storage_formats.remote.urls import IndexLocation, is_url, local_path

__all__ = ["Directory", "Place", "Prefix", "open_place", "reading_place"]


def open_place(location: IndexLocation) -> Place:
    """Return the place of the index at `location`, a directory or a URL.

    Raises:
        UsageError: `location` is a URL at which no index can be written.
    """
    if is_url(location):
        return Prefix.open(str(location))
    return Directory(local_path(location).absolute())


def reading_place(location: IndexLocation) -> Place:
    """Return the place of the index at `location`, a directory or a URL, to read it.

    Raises:
        UsageError: `location` is neither a path nor a URL.
    """
    if is_url(location):
        return Prefix.reading(str(location))
    return Directory(as_path(location, "root"))
