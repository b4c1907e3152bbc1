"""The text that names a source: a path, a URL, a pattern, or "-" for standard input."""

from __future__ import annotations

import os
import urllib.parse

from edje_index.images.inputs import display_path
from edje_index.images.remote.urls import is_remote, scheme_of
from storage_formats.format.object_store import WEB_SCHEMES

STANDARD_INPUT = "-"


def is_url(spec: str) -> bool:
    """Return True if a source is named by a URL that this package reads."""
    return is_remote(os.fsencode(spec))


def absolute_path(spec: str) -> bytes:
    """Return the absolute path of a source, or its URL."""
    return os.fsencode(spec) if is_url(spec) else os.path.abspath(os.fsencode(spec))


def absolute_spec(spec: str) -> str:
    """Return a source as the index records it, so that it means the same in every working directory."""
    return spec if spec == STANDARD_INPUT else display_path(absolute_path(spec))


def file_name(spec: str) -> str:
    """Return the path or URL of a file. The query of a web URL is removed, so that the URL ends in the file suffix."""
    if scheme_of(spec) not in WEB_SCHEMES:
        return spec
    return urllib.parse.urlsplit(spec)._replace(query="", fragment="").geturl()
