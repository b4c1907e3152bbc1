"""Opens sources. Sources that cannot be read or that overlap raise an error."""

from __future__ import annotations

import glob
import itertools
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from edje_index.images.containers.container import TAR_SUFFIXES
from edje_index.images.inputs import InputRef
from edje_index.images.remote.urls import is_remote, scheme_of
from pipelines.sources.archives import ARCHIVE_KINDS, archive_source, compression_of, is_archive_name, scan_ahead
from pipelines.sources.base import Source
from pipelines.sources.braces import expand_braces
from pipelines.sources.caption_file import CAPTION_SUFFIX, CaptionFileSource
from pipelines.sources.files import read_head
from pipelines.sources.folder import FolderSource, ImageFileSource, holds_inputs
from pipelines.sources.lines import LINES_SUFFIX, LinesSource
from pipelines.sources.path_list import LIST_SUFFIXES, PathListSource
from pipelines.sources.remote import matching_urls, open_remote, refuse_credentials
from pipelines.sources.selection import has_input_suffix, is_input
from pipelines.sources.specs import STANDARD_INPUT, is_url
from storage_formats.errors import UsageError

ACCEPTED = (
    "a directory, a .tar (also .tar.gz, .tar.xz, .tar.zst), a .zip, a Parquet file of images, a list of paths "
    f"({', '.join((*LIST_SUFFIXES, LINES_SUFFIX))}, or - for standard input), a caption file "
    f"({CAPTION_SUFFIX}, of COCO or Karpathy), an image file, a URL of any of these, or a quoted pattern such as "
    "'shards-{0000..0127}.tar' or 'shards/*.tar'"
)


def open_sources(specs: Iterable[str], column: str | None = None, *, clips: bool = False) -> list[Source]:
    """Open sources in order. A brace pattern opens one source per name.

    Args:
        specs: paths or brace patterns; `ACCEPTED` lists the kinds of sources.
        column: name of the path column in lists of paths; None selects the first column with a name in `PATH_COLUMNS`.
        clips: True if video files are inputs, too.

    Raises:
        UsageError: a source does not exist, is of an unknown kind, or overlaps another source. Also raised if `column`
            is given but no source is a list of paths.
    """
    sources = [open_source(name, column, clips=clips) for spec in specs for name in _expanded(spec)]
    if column is not None and not any(source.kind in ("list", "parquet") for source in sources):
        raise UsageError(
            f"the column {column} is given, but no source is a table with columns; leave the column out",
            parameter="column",
        )
    _refuse_overlaps(sources)
    return sources


def iter_all(sources: Sequence[Source]) -> Iterator[InputRef]:
    """Yield the inputs of all sources in row order."""
    # Consecutive archives are read in parallel, because reading the headers mostly waits for the disk.
    for are_archives, group in itertools.groupby(sources, lambda source: source.kind in ARCHIVE_KINDS):
        if are_archives:
            yield from scan_ahead(list(group))
        else:
            for source in group:
                yield from source.iter_inputs()


def open_source(spec: str, column: str | None = None, *, clips: bool = False) -> Source:
    """Open one directory or file as a source.

    Args:
        spec: path of the directory or file.
        column: name of the path column, if the file is a list of paths; None selects the first column with a name in
            `PATH_COLUMNS`.
        clips: True if video files are inputs, too.

    Raises:
        UsageError: the path does not exist, cannot be read, or is not a source.
    """
    if spec == STANDARD_INPUT:
        return LinesSource(spec)
    refuse_credentials(spec)
    if is_url(spec):
        return open_remote(spec, column, clips=clips)
    if scheme_of(spec) is not None:
        raise UsageError(
            f"{spec} is not a local path; mount the storage, or copy the files to this machine", parameter="sources"
        )
    if os.path.isdir(spec):
        if not os.access(spec, os.R_OK | os.X_OK):
            raise UsageError(
                f"cannot list the directory {spec}: permission denied; change its permissions", parameter="sources"
            )
        return FolderSource(spec, clips=clips)
    head = _head(spec)
    return _archive(spec, head, column, clips=clips) or _list(spec, column) or _file(spec, head, clips=clips)


def _archive(spec: str, head: bytes, column: str | None, *, clips: bool) -> Source | None:
    import pyarrow as pa

    if compression_of(head) and not is_archive_name(spec):
        raise UsageError(
            f"{spec} is compressed ({compression_of(head)}), but its name does not end in {', '.join(TAR_SUFFIXES)}; "
            "rename the file if it is a tar archive",
            parameter="sources",
        )
    try:
        return archive_source(spec, head, column, clips=clips)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UsageError(f"cannot read {spec}: {error}; check the file and its format", parameter="sources") from error


def _list(spec: str, column: str | None) -> Source | None:
    suffix = os.path.splitext(spec)[1].lower()
    if suffix in LIST_SUFFIXES:
        return PathListSource(spec, column)
    if suffix == CAPTION_SUFFIX:
        return CaptionFileSource(spec)
    return LinesSource(spec) if suffix == LINES_SUFFIX else None


def _file(spec: str, head: bytes, *, clips: bool) -> Source:
    if is_input(head, clips) or has_input_suffix(os.fsencode(spec), clips):
        return ImageFileSource(spec)
    if is_input(head, clips=True):
        raise UsageError(f"{spec} is a video; set the number of frames per clip to index videos", parameter="sources")
    raise UsageError(f"{spec} is not a source of images; give {ACCEPTED}", parameter="sources")


def _expanded(spec: str) -> list[str]:
    """Return the names that a pattern of braces and wildcards expands to. The matches of a wildcard are sorted."""
    if spec == STANDARD_INPUT or os.path.exists(spec):
        return [spec]
    return [name for pattern in expand_braces(spec) for name in _matches(pattern)]


def _matches(pattern: str) -> list[str]:
    if is_url(pattern):
        return matching_urls(pattern)
    if not glob.has_magic(pattern) or os.path.exists(pattern):
        return [pattern]
    names = sorted(glob.glob(pattern, recursive=True), key=os.fsencode)
    if not names:
        raise UsageError(f"no file matches {pattern}; check the pattern", parameter="sources")
    return names


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
        other = source_of_path.setdefault(_real_path(source), source)
        if other is not source:
            raise UsageError(
                f"{other.spec} and {source.spec} are the same source; name this source once", parameter="sources"
            )
    folders = {path: source for path, source in source_of_path.items() if source.kind == "folder"}
    is_part_of_folder = _PartsOfFolders()
    for path, source in source_of_path.items():
        outer = next((folders[parent] for parent in _parents(path) if parent in folders), None)
        if outer is not None and is_part_of_folder(source):
            raise UsageError(
                f"{source.spec} is inside {outer.spec}; leave out one of these sources", parameter="sources"
            )


def _real_path(source: Source) -> bytes:
    return source.path if is_remote(source.path) else os.path.realpath(source.path)


class _PartsOfFolders:
    """Finds sources whose inputs are also inputs of a directory that contains the source. Lists a directory once."""

    def __init__(self) -> None:
        self._listings: dict[bytes, list[bytes]] = {}

    def __call__(self, source: Source) -> bool:
        """Return True if the inputs of `source` are also inputs of a directory that contains `source`."""
        if source.kind in ARCHIVE_KINDS:
            return not is_remote(source.path) and not self._has_others_beside(source)
        return source.kind in ("folder", "image")

    def _has_others_beside(self, archive: Source) -> bool:
        """Return True if the directory of `archive` also contains images or clips, so it does not read `archive`."""
        directory = os.path.dirname(_real_path(archive))
        if directory not in self._listings:
            self._listings[directory] = os.listdir(directory)
        return holds_inputs(self._listings[directory], archive.clips)


def without_nested(sources: Sequence[Source]) -> list[Source]:
    """Return `sources` without repeated sources and without sources that are inside another source."""
    directories = {_real_path(source) for source in sources if source.kind == "folder"}
    kept: dict[bytes, Source] = {}
    is_part_of_folder = _PartsOfFolders()
    for source in sources:
        path = _real_path(source)
        is_nested = any(parent in directories for parent in _parents(path)) and is_part_of_folder(source)
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
