"""The directory for cached and temporary files of indexes on object stores."""

from __future__ import annotations

import os
from pathlib import Path

from storage_formats.errors import UsageError


def cache_directory() -> Path:
    """Return the directory for cached files. This is the directory in the environment
    variable `EDJE_CACHE` if it is set, and otherwise `edje-index` in the cache
    directory of the user.

    Raises:
        UsageError: the user has no home directory, as in a container with a random user
            id, and `EDJE_CACHE` is not set.
    """
    if configured := os.environ.get("EDJE_CACHE"):
        return Path(configured).absolute()
    parent = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if parent.startswith("~"):
        raise UsageError(
            "this user has no home directory for cached files; set EDJE_CACHE to a"
            " directory"
        )
    return Path(parent, "edje-index").absolute()
