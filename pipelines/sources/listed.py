"""Inputs that a list names, by their paths or URLs."""

from __future__ import annotations

import os
import urllib.parse
from typing import Any

from edje_index.images.inputs import InputRef
from edje_index.images.remote.urls import has_credentials, is_remote, scheme_of
from pipelines.sources.files import file_input
from storage_formats.format.object_store import WEB_SCHEMES


def listed_input(value: Any, directory: bytes) -> InputRef | None:
    """Return the input with the path or URL `value`; None if `value` is neither, or is a URL with credentials.

    Args:
        value: the value in the list.
        directory: directory or URL at which relative paths start. A list on a server cannot name local files.
    """
    if isinstance(value, str):
        scheme = scheme_of(value)
        if scheme is not None and scheme != "file":
            return _url_input(value.strip())
        try:
            value = urllib.parse.unquote_to_bytes(value[len("file://") :]) if scheme else os.fsencode(value)
        except UnicodeEncodeError:  # a lone surrogate, from a JSON escape
            return None
        if scheme and is_remote(directory):
            return None
    if not isinstance(value, bytes) or not value or b"\0" in value:
        return None
    if is_remote(directory):
        is_below = not value.startswith(b"/") and b".." not in value.split(b"/")
        return file_input(directory + b"/" + value) if is_below else None
    return file_input(os.path.join(directory, value))


def _url_input(url: str) -> InputRef | None:
    bucket, _, key = url.partition("://")[2].partition("/")
    if scheme_of(url) not in WEB_SCHEMES:  # keys of an object store are no encoded addresses
        key = key.replace(" ", "")
    if any(letter.isspace() or not letter.isprintable() for letter in bucket + key):
        return None
    if has_credentials(url):  # the index would store a password in clear text
        return None
    ref = InputRef(url, os.fsencode(url), problem="not-a-local-path")
    return file_input(ref.path) if is_remote(ref.path) else ref
