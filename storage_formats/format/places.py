"""The places where an index can lie: a directory, or a prefix of an object store. All
changes of an index write and remove files through a `Place`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeAlias

from storage_formats.arguments import as_path
from storage_formats.format.directory import Directory
from storage_formats.format.prefix import Prefix
from storage_formats.remote.urls import IndexLocation, is_url, local_path

Place: TypeAlias = Directory | Prefix
"""A place where an index can lie. Both classes have the operations that `Directory`
describes.
"""


@contextlib.contextmanager
def open_place(location: IndexLocation) -> Iterator[Place]:
    """Context manager that yields the place of the index at `location`, a directory or
    a URL. The temporary files of the place are removed at the end.

    Raises:
        UsageError: `location` is a URL at which no index can be written.
    """
    if not is_url(location):
        yield Directory(local_path(location).absolute())
        return
    with contextlib.closing(Prefix.open(str(location))) as prefix:
        yield prefix


def reading_place(location: IndexLocation) -> Place:
    """Return the place of the index at `location`, a directory or a URL, to read it.

    Raises:
        UsageError: `location` is neither a path nor a URL.
    """
    if is_url(location):
        return Prefix.reading(str(location))
    return Directory(as_path(location, "root"))
