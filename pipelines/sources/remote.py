"""Opens sources that are named by a URL."""

from __future__ import annotations

import fnmatch
import glob
import os

from edje_index.images.remote.access import list_remote_folder, require_libraries
from edje_index.images.remote.urls import has_credentials, scheme_of, without_credentials
from pipelines.sources.archives import PARQUET_SUFFIX, ArchiveFile, archive_source, is_archive_name
from pipelines.sources.base import Source
from pipelines.sources.folder import ImageFileSource
from pipelines.sources.lines import LINES_SUFFIX, LinesSource
from pipelines.sources.path_list import LIST_SUFFIXES, PathListSource
from pipelines.sources.remote_folder import RemoteFolderSource
from pipelines.sources.selection import has_input_suffix
from pipelines.sources.specs import file_name
from storage_formats.errors import UsageError
from storage_formats.format.object_store import WEB_SCHEMES


def open_remote(url: str, column: str | None = None, *, clips: bool = False) -> Source:
    """Open a source on a server. Archives are opened when they are listed.

    Args:
        url: URL of a file or directory.
        column: column of images or paths, if the file is a table.
        clips: True if video files are inputs, too.

    Raises:
        UsageError: the file cannot be read, or the server lists no directories.
        MissingExtraError: the library for this kind of server is not installed.
    """
    import pyarrow as pa

    require_libraries(url)
    suffix = os.path.splitext(file_name(url))[1].lower()
    try:
        if suffix == PARQUET_SUFFIX:
            return archive_source(url, b"", column) or PathListSource(url, column)
        if is_archive_name(url):
            return ArchiveFile(url, clips=clips)
        if suffix in LIST_SUFFIXES:
            return PathListSource(url, column)
        if suffix == LINES_SUFFIX:
            return LinesSource(url)
        if has_input_suffix(os.fsencode(file_name(url)), clips) or file_name(url) != url:
            return ImageFileSource(url)
        return _folder(url, clips)
    except (OSError, ValueError, EOFError, pa.ArrowException) as error:
        raise _unusable(url, error) from error


def refuse_credentials(url: str) -> None:
    """Raise UsageError if `url` contains a user name or a password. The index would store them."""
    if has_credentials(url):
        raise UsageError(
            f"{without_credentials(url)} contains a user name or a password, which the index would store; "
            "remove them from the URL, and put the credentials into the environment",
            parameter="sources",
        )


def matching_urls(pattern: str) -> list[str]:
    """Return the URLs that a pattern matches, sorted. Wildcards are allowed after the last slash only.

    Raises:
        UsageError: nothing matches, the server cannot list its files, or the pattern contains credentials.
    """
    refuse_credentials(pattern)
    parent, _, name = pattern.rpartition("/")
    if scheme_of(pattern) in WEB_SCHEMES or not glob.has_magic(pattern):
        return [pattern]
    if glob.has_magic(parent):
        raise UsageError(
            f"{pattern} has a wildcard in a directory; use wildcards only after the last slash", parameter="sources"
        )
    require_libraries(pattern)
    try:
        folder = list_remote_folder(parent)
    except (OSError, ValueError) as error:
        raise _unusable(pattern, error) from error
    names = [file.name for file in folder.files] if folder is not None else []
    matching = sorted(fnmatch.filter(names, name), key=os.fsencode)
    if not matching:
        raise UsageError(f"no file matches {pattern}; check the pattern", parameter="sources")
    return [f"{parent}/{each}" for each in matching]


def _folder(url: str, clips: bool) -> Source:
    folder = list_remote_folder(url)
    if folder is None:
        raise UsageError(
            f"{url} is not an image, archive or table, and web servers do not list directories; give the URLs of "
            "files, or a file with a list of URLs",
            parameter="sources",
        )
    if not folder.files and not folder.directories:
        raise UsageError(f"{url} does not exist; check the URL", parameter="sources")
    return RemoteFolderSource(url, clips=clips)


def _unusable(url: str, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or error
    return UsageError(f"cannot read {url}: {reason}; check the URL and the credentials", parameter="sources")
