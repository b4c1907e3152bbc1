"""Distinguishes paths from URLs, and splits URLs into their parts. A URL names an
object in an object store, a file on a web server, or a file in a repository of the
Hugging Face Hub, `hf://[datasets/]OWNER/NAME[@REVISION]/PATH`.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

from storage_formats.arguments import as_path
from storage_formats.errors import UsageError

STORE_SCHEMES = ("s3", "gs", "az")
WEB_SCHEMES = ("http", "https")
HUB_SCHEME = "hf"
INDEX_SCHEMES = (*STORE_SCHEMES, *WEB_SCHEMES, HUB_SCHEME)
HUB_CREDENTIALS = "set HF_TOKEN to a token that may do this, or run 'hf auth login'"

_HUB_KINDS = ("datasets", "spaces")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_USER = re.compile(r"(?<=://)[^/?#\s]*@")

IndexLocation = str | Path
"""Location of an index: the path of a directory, or a URL such as
`s3://bucket/photos.edje`.
"""


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL in lower case; None for a path."""
    match = _SCHEME.match(text)
    return None if match is None else match[1].lower()


def is_url(location: IndexLocation | bytes) -> bool:
    """Return True if `location` is a URL that this package reads, and not a path."""
    return scheme_of(os.fsdecode(location)) in INDEX_SCHEMES


def has_credentials(url: str) -> bool:
    """Return True if `url` contains a user name or a password, as
    `https://user:password@host` does.
    """
    return scheme_of(url) is not None and without_credentials(url) != url


def without_credentials(text: str) -> str:
    """Return `text` with the user name and the password in each URL replaced by
    "...".
    """
    return _USER.sub("...@", text)


def local_path(location: IndexLocation, *, advice: str = "") -> Path:
    """Return the path of a file or directory on this machine. A URL raises a
    UsageError that ends in `advice`.
    """
    if _looks_like_url(location):
        raise UsageError(
            f"{without_credentials(str(location))} is a URL, but a path on this machine"
            f" is needed{advice}"
        )
    return as_path(location, "location")


def index_location(location: IndexLocation) -> IndexLocation:
    """Return the URL or the path of an index.

    Raises:
        UsageError: `location` is a URL that does not begin with one of `INDEX_SCHEMES`.
    """
    if is_url(location):
        return location
    if _looks_like_url(location):
        raise UsageError(
            f"an index cannot be at {without_credentials(str(location))}; give a"
            " directory, or a URL that begins with "
            + ", ".join(f"{scheme}://" for scheme in INDEX_SCHEMES)
        )
    return as_path(location, "location")


def hub_kind(location: IndexLocation) -> str | None:
    """Return what a URL of the Hub names: "models", "datasets" or "spaces". Return
    None for other locations.
    """
    if scheme_of(str(location)) != HUB_SCHEME:
        return None
    first = str(location).partition("://")[2].partition("/")[0]
    return first if first in _HUB_KINDS else "models"


def hub_address(url: str) -> tuple[str, str, str, str, dict[str, str]]:
    """Split a URL of the Hub into (server, repository, revision, path, headers), where
    the repository is, for example, "datasets/OWNER/NAME".

    The headers of a request contain the access token in the environment variable
    `HF_TOKEN`, or else the token that `hf auth login` has stored. Without a token, the
    headers are empty. Raises ValueError if the URL names no repository, or if the token
    is not valid.
    """
    parts = url.partition("://")[2].strip("/").split("/")
    length = 3 if parts[0] in _HUB_KINDS else 2
    if len(parts) < length or not all(parts):
        raise ValueError(
            f"{url} names no repository; give a URL such as hf://datasets/OWNER/NAME"
        )
    repository, _, revision = "/".join(parts[:length]).partition("@")
    # The revisions of pull requests and conversions are the only ones with slashes. In
    # other revisions, a slash is written as %2F.
    if revision == "refs":
        revision = "/".join([revision, *parts[length : length + 2]])
        length += 2
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = os.environ.get("HF_HOME") or f"{cache}/huggingface"
        with contextlib.suppress(OSError):
            token = Path(os.path.expanduser(folder), "token").read_text().strip()
    # A token with line breaks or characters that are not ASCII is refused here, because
    # the HTTP library would raise an error that shows the token.
    if not (token.isascii() and token.isprintable()):
        raise ValueError(
            "the token of the Hub has line breaks or characters that are not ASCII; set"
            " HF_TOKEN again"
        )
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    path = "/".join(parts[length:])
    return endpoint, repository, unquote(revision) or "main", path, headers


def web_address(url: str) -> tuple[str, dict[str, str]]:
    """Return the URL on a web server of the file or folder at `url`, and the headers of
    a request for it. If `url` is not a URL of the Hub, return it without headers.
    """
    if scheme_of(url) != HUB_SCHEME:
        return url, {}
    server, repository, revision, path, headers = hub_address(url)
    address = f"{server}/{repository}/resolve/{quote(revision, safe='')}/{quote(path)}"
    return address.rstrip("/"), headers


def _looks_like_url(location: IndexLocation) -> bool:
    # a `Path` made from a URL has only one slash after the colon
    scheme, colon, _ = str(location).partition(":/")
    return bool(colon) and "/" not in scheme
