"""A local copy of a file on a server."""

from __future__ import annotations

import os
import tempfile
import weakref

from edje_index.images.inputs import MAX_INPUT_BYTES
from edje_index.images.remote.access import read_remote
from edje_index.images.remote.urls import is_remote


class LocalFile:
    """A local file, or a temporary copy of a file on a server. The copy is removed together with this object.

    Args:
        path: path or URL of the file. A file on a server may have at most 1 GiB.

    Attributes:
        path: path of the file or of the copy.

    Raises:
        OSError: the file cannot be read from the server.
    """

    def __init__(self, path: bytes) -> None:
        self.path = path
        if is_remote(path):
            data = read_remote(os.fsdecode(path), MAX_INPUT_BYTES)
            fd, name = tempfile.mkstemp(prefix="edje-list-")
            weakref.finalize(self, os.unlink, name)
            with os.fdopen(fd, "wb") as copy:
                copy.write(data)
            self.path = os.fsencode(name)
