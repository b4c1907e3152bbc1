"""Opens sources. Sources that cannot be read or that overlap raise an error."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from edje_index.images.headers import image_format
from edje_index.images.inputs import InputRef
from pipelines.sources.base import Source
from pipelines.sources.braces import expand_braces
from pipelines.sources.folder import FolderSource, ImageFileSource, read_head
from pipelines.sources.path_list import LIST_SUFFIXES, PathListSource
from pipelines.sources.selection import has_image_suffix
from pipelines.sources.webdataset import WebDatasetSource
from storage_formats.errors import UsageError

ACCEPTED = (
    "a directory, an uncompressed .tar (or a pattern such as shards-{0000..0127}.tar), "
    f"a list of paths ({', '.join(LIST_SUFFIXES)}), or an image file"
)
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_ARCHIVES_AT_ONCE = 8
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def open_sources(specs: Iterable[str], column: str | None = None) -> list[Source]:
    """Open sources in order. A brace pattern opens one source per name.

    Args:
        specs: paths or brace patterns; `ACCEPTED` lists the kinds of sources.
        column: name of the path column in lists of paths; None selects the first column with a name in `PATH_COLUMNS`.

    Raises:
        UsageError: a source does not exist, is of an unknown kind, or overlaps another source. Also raised if `column`
            is given but no source is a list of paths.
    """
    sources = [open_source(name, column) for spec in specs for name in _expanded(spec)]
    if column is not None and not any(source.kind == "list" for source in sources):
        raise UsageError(
            f"the column {column} is given, but no source is a list of paths; leave the column out", parameter="column"
        )
    _refuse_overlaps(sources)
    return sources


def iter_all(sources: Sequence[Source]) -> Iterator[InputRef]:
    """Yield the inputs of all sources in row order."""
    # Consecutive tar archives are read in parallel, because reading the headers mostly waits for the disk.
    for are_tars, group in itertools.groupby(sources, lambda source: source.kind == "webdataset"):
        if are_tars:
            yield from _scan_ahead(list(group))
        else:
            for source in group:
                yield from source.iter_inputs()


def _scan_ahead(archives: list[Source]) -> Iterator[InputRef]:
    if len(archives) == 1:
        yield from archives[0].iter_inputs()
        return
    pending: deque[Future[list[InputRef]]] = deque()
    with ThreadPoolExecutor(_ARCHIVES_AT_ONCE, "edje-scan") as pool:
        try:
            for archive in archives:
                pending.append(pool.submit(list, archive.iter_inputs()))
                if len(pending) >= _ARCHIVES_AT_ONCE:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def open_source(spec: str, column: str | None = None) -> Source:
    """Open one directory or file as a source.

    Args:
        spec: path of the directory or file.
        column: name of the path column, if the file is a list of paths; None selects the first column with a name in
            `PATH_COLUMNS`.

    Raises:
        UsageError: the path does not exist, cannot be read, or is not a source.
    """
    suffix = os.path.splitext(spec)[1].lower()
    if _SCHEME.match(spec):
        raise UsageError(
            f"{spec} is not a local path; mount the storage, or copy the files to this machine", parameter="sources"
        )
    if os.path.isdir(spec):
        if not os.access(spec, os.R_OK | os.X_OK):
            raise UsageError(
                f"cannot list the directory {spec}: permission denied; change its permissions", parameter="sources"
            )
        return FolderSource(spec)
    if suffix in LIST_SUFFIXES and os.path.isfile(spec):
        return PathListSource(spec, column)
    head = _head(spec)
    compression = next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)
    if compression:
        raise UsageError(
            f"{spec} is compressed ({compression}), so its members cannot be read in place; decompress "
            "the archive first",
            parameter="sources",
        )
    if suffix == ".tar":
        return WebDatasetSource(spec)
    if image_format(head) or has_image_suffix(os.fsencode(spec)):
        return ImageFileSource(spec)
    raise UsageError(f"{spec} is not a source of images; give {ACCEPTED}", parameter="sources")


def _expanded(spec: str) -> list[str]:
    return [spec] if os.path.exists(spec) else expand_braces(spec)


def _head(spec: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(spec).st_mode):
            raise UsageError(f"{spec} is neither a directory nor a regular file; give {ACCEPTED}", parameter="sources")
        return read_head(os.fsencode(spec))
    except FileNotFoundError as error:
        raise UsageError(f"{spec} does not exist; check the path", parameter="sources") from error
    except OSError as error:
        raise UsageError(f"cannot read {spec}: {error.strerror}; check the permissions", parameter="sources") from error


def _refuse_overlaps(sources: Sequence[Source]) -> None:
    """Raise UsageError if two sources are the same, or if one source is inside another source."""
    source_of_path: dict[bytes, Source] = {}
    for source in sources:
        other = source_of_path.setdefault(os.path.realpath(source.path), source)
        if other is not source:
            raise UsageError(
                f"{other.spec} and {source.spec} are the same source; name this source once", parameter="sources"
            )
    for path, source in source_of_path.items():
        for parent in _parents(path) if source.kind in ("folder", "image") else ():
            outer = source_of_path.get(parent)
            if outer is not None and outer.kind == "folder":
                raise UsageError(
                    f"{source.spec} is inside {outer.spec}; leave out one of these sources", parameter="sources"
                )


def without_nested(sources: Sequence[Source]) -> list[Source]:
    """Return `sources` without repeated sources and without sources that are inside another source."""
    directories = {os.path.realpath(source.path) for source in sources if source.kind == "folder"}
    kept: dict[bytes, Source] = {}
    for source in sources:
        path = os.path.realpath(source.path)
        is_nested = source.kind in ("folder", "image") and any(parent in directories for parent in _parents(path))
        if not is_nested:
            kept.setdefault(path, source)
    return list(kept.values())


def _parents(path: bytes) -> Iterator[bytes]:
    while (parent := os.path.dirname(path)) != path:
        yield parent
        path = parent


def count_ignored(sources: Sequence[Source]) -> dict[str, int]:
    """Return the number of entries of all `sources` that are not inputs, by suffix or reason."""
    total: Counter[str] = Counter()
    for source in sources:
        total.update(source.ignored)
    return dict(sorted(total.items()))
