"""Sources of images: directories, archives, tables, and single image files.

This package opens sources, lists their inputs, and finds duplicates. Sources that
cannot be read or that overlap are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import glob
import hashlib
import itertools
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from edje_index.inputs.containers import ARCHIVE_SUFFIXES, container_kind
from edje_index.inputs.names import file_name, has_input_suffix
from edje_index.inputs.preparation import Preparation
from edje_index.inputs.refs import InputRef
from edje_index.inputs.tables import STANDARD_INPUT, TABLE_SUFFIXES
from pipelines.progress.events import (
    JobStopped,
    OnEvent,
    Progress,
    ShouldStop,
    StatusMessage,
)
from pipelines.sources.base import (
    Patterns,
    Source,
    SourceError,
    holds_inputs,
    is_input,
    read_head,
    unreadable,
)
from pipelines.sources.kinds import TableSource, TreeSource, is_packed, iter_all
from storage_formats.errors import UsageError
from storage_formats.format.source_columns import metadata_text
from storage_formats.remote.files import list_remote_folder, require_libraries
from storage_formats.remote.urls import (
    WEB_SCHEMES,
    has_credentials,
    is_url,
    scheme_of,
    without_credentials,
)
from storage_formats.threads import ordered_map, usable_cpus

if TYPE_CHECKING:
    from edje_index.inputs.helpers import Helpers, Threads

ACCEPTED = (
    f"a directory, an archive ({', '.join(ARCHIVE_SUFFIXES)}), a table of images or of"
    f" paths ({', '.join(TABLE_SUFFIXES)}, or - for standard input), an image file, a"
    " URL of any of these, or a quoted pattern such as 'shards-{0000..0127}.tar' or"
    " 'shards/*.tar'"
)
MAX_EXPANSIONS = 100_000
_BRACES = re.compile(r"\{(?:(-?\d{1,18})\.\.(-?\d{1,18})|([^{}]*,[^{}]*))\}")
_MAX_THREADS = 8
# number of calls per thread that hash inputs ahead of the caller
_AHEAD = 4
# Threads hash this number of inputs in the time in which helper processes start.
_THREADED_INPUTS = 10_000
# shortest time between two progress events
_REPORT_SECONDS = 0.5
_STOPPED = "stopped while listing the sources"


def open_sources(
    specs: Iterable[str],
    column: str | None = None,
    *,
    clips: bool = False,
    patterns: Patterns | None = None,
) -> list[Source]:
    """Open sources in order. A pattern opens one source per name that it stands for.

    Args:
        specs: paths, URLs, or patterns with braces or wildcards; `ACCEPTED` lists the
            kinds of sources.
        column: see `open_source`.
        clips: True if video files are inputs, too.
        patterns: which inputs the sources yield; None for all.

    Raises:
        UsageError: a source does not exist, is of an unknown kind, or overlaps another
            source. Also raised if `column` is given but no source is a table.
    """
    sources = [
        open_source(name, column, clips=clips)
        for spec in specs
        for pattern in ([spec] if os.path.exists(spec) else expand_braces(spec))
        for name in _matches(pattern)
    ]
    for source in sources:
        source.patterns = patterns or source.patterns
    has_columns = any(
        isinstance(source, TableSource) or source.is_directory for source in sources
    )
    if column is not None and not has_columns:
        raise UsageError(
            f"the column {column} is given, but no source is a table with columns;"
            " leave the column out",
            parameter="column",
        )
    for source, other in _contained(sources):
        raise SourceError(
            f"{other.spec} contains all inputs of {source.spec}; leave out one of these"
            " sources"
        )
    return sources


def without_nested(sources: Sequence[Source]) -> list[Source]:
    """Return `sources` without repeated sources and without sources that are inside
    another source.
    """
    contained = {id(source) for source, _ in _contained(sources)}
    return [source for source in sources if id(source) not in contained]


def hash_and_mark_duplicates(refs: Iterable[InputRef]) -> Iterator[InputRef]:
    """Yield the inputs with their content hashes. For each duplicate, `duplicate_of` is
    set to the position of the first identical input in `refs`.

    An input that cannot be read gets a `problem`. The hashes are kept in a temporary
    database on disk, to bound memory.
    """
    with temporary_database() as database:
        database.execute("CREATE TABLE first(hash BLOB PRIMARY KEY, row) WITHOUT ROWID")
        for row, ref in enumerate(hashed(refs)):
            if ref.content_hash is not None:
                content = bytes.fromhex(ref.content_hash)
                added = database.execute(
                    "INSERT OR IGNORE INTO first VALUES(?, ?)", [content, row]
                )
                if not added.rowcount:
                    ((original,),) = database.execute(
                        "SELECT row FROM first WHERE hash = ?", [content]
                    )
                    ref = dataclasses.replace(ref, duplicate_of=original)
            yield ref


@contextlib.contextmanager
def temporary_database() -> Iterator[sqlite3.Connection]:
    """Context manager that gives an empty database in a temporary file. At the end, the
    connection is closed and the file is removed.

    The database takes at most about 64 MiB of memory, half of it for sorting. The
    environment variable TMPDIR names the directory of the file.
    """
    # For SQLite, an empty name means a temporary file.
    with contextlib.closing(
        sqlite3.connect("", isolation_level=None, check_same_thread=False)
    ) as database:
        database.execute("PRAGMA cache_size = -32768")
        database.execute("PRAGMA journal_mode = OFF")
        # All statements are in one transaction. Otherwise, each would be written to the
        # file separately.
        database.execute("BEGIN")
        yield database


def hashed(refs: Iterable[InputRef]) -> Iterator[InputRef]:
    """Yield `refs` in order with their content hashes. A limited number of inputs is
    read and hashed ahead of the caller: the first inputs in threads, and the others of
    a large collection in helper processes.

    An input that cannot be read gets a `problem`. An input that already has a content
    hash or a `problem` is not read.
    """
    from edje_index.inputs.helpers import MESSAGE_INPUTS, Helpers, Threads

    preparation = Preparation()
    remaining = iter(refs)
    first = itertools.islice(remaining, _THREADED_INPUTS)
    count = min(_MAX_THREADS, 2 * usable_cpus())
    yield from _hashed(first, Threads(count, preparation, 1), 1)
    for ref in remaining:
        with contextlib.closing(
            Helpers(usable_cpus(), preparation, MESSAGE_INPUTS)
        ) as helpers:
            rest = itertools.chain([ref], remaining)
            yield from _hashed(rest, helpers, MESSAGE_INPUTS)


def _hashed(
    refs: Iterable[InputRef], helpers: Helpers | Threads, at_once: int
) -> Iterator[InputRef]:
    """See `hashed`. Several threads call `helpers.prepare`, each for `at_once`
    inputs.
    """

    def with_hashes(part: list[InputRef]) -> list[InputRef]:
        jobs = [
            job
            for job in enumerate(part)
            if job[1].problem is None and job[1].content_hash is None
        ]
        for (position, ref), columns in zip(jobs, helpers.prepare(jobs), strict=True):
            part[position] = dataclasses.replace(
                ref,
                size=columns.get("size", ref.size),
                content_hash=columns.get("content_hash"),
                problem=columns.get("reason"),
            )
        return part

    remaining = iter(refs)
    parts = iter(lambda: list(itertools.islice(remaining, at_once)), [])
    threads = helpers.count
    for part in ordered_map(with_hashes, parts, threads, threads * _AHEAD):
        yield from part


class Listing:
    """Iterable over the inputs of all `sources` in row order.

    An iteration lists the sources. It reports its progress to `on_event`, and at the
    end also the patterns that match no input.

    Attributes:
        inputs: number of inputs so far.

    Raises:
        JobStopped: `should_stop()` returned True. It is called before each input is
            yielded and after the last input.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        on_event: OnEvent,
        should_stop: ShouldStop,
    ) -> None:
        self.sources = sources
        self.inputs = 0
        self._digest = hashlib.sha256()
        self._on_event = on_event
        self._should_stop = should_stop

    def __iter__(self) -> Iterator[InputRef]:
        reported_at = time.monotonic()
        for ref in iter_all(self.sources):
            self.inputs += 1
            if self._should_stop():
                raise JobStopped(_STOPPED)
            values = ref.metadata and metadata_text(ref.metadata)
            self._digest.update(f"{(*ref.location, values)}\n".encode())
            if time.monotonic() - reported_at >= _REPORT_SECONDS:
                reported_at = time.monotonic()
                self._on_event(Progress("listing the sources", self.inputs))
            yield ref
        for pattern in self.sources[0].patterns.unmatched if self.sources else ():
            text = f"no input matches the pattern {pattern!r}"
            self._on_event(StatusMessage(text, is_warning=True))
        # Ctrl-C also ends the program that writes a list to standard input. The list
        # then ends early, and must not be taken for a complete list.
        if self._should_stop():
            raise JobStopped(_STOPPED)

    @property
    def digest(self) -> str:
        """SHA-256 of the inputs so far, in hexadecimal."""
        return self._digest.hexdigest()

    @property
    def ignored(self) -> dict[str, int]:
        """Number of entries that are not inputs, by suffix or reason."""
        total = sum((Counter(source.ignored) for source in self.sources), Counter())
        return dict(sorted(total.items()))


def open_source(
    spec: str,
    column: str | None = None,
    *,
    clips: bool = False,
) -> Source:
    """Open one directory or file as a source. Archives are opened when they are listed.

    Args:
        spec: path or URL of the directory or file, or "-" for standard input.
        column: name of the column of images of a table; None selects one, see
            `edje_index.inputs.tables.Table`.
        clips: True if video files are inputs, too.

    Raises:
        UsageError: the path does not exist, cannot be read, or is not a source.
    """
    if spec == STANDARD_INPUT:
        return _open_table(spec, None)
    _refuse_credentials(spec)
    if is_url(spec):
        require_libraries(spec)
    elif scheme_of(spec) is not None:
        raise SourceError(
            f"{spec} is not a local path; mount the storage, or copy the files to this"
            " machine"
        )
    elif os.path.isdir(spec):
        if not os.access(spec, os.R_OK | os.X_OK):
            raise SourceError(
                f"cannot list the directory {spec}: permission denied; change its"
                " permissions"
            )
        return TreeSource(spec, True, column, clips=clips)
    elif os.path.exists(spec) and not os.path.isfile(spec):
        raise SourceError(
            f"{spec} is neither a directory nor a regular file; give {ACCEPTED}"
        )
    try:
        name = file_name(spec)
        head = b"" if is_url(spec) else read_head(os.fsencode(spec))
        if os.path.splitext(name)[1].lower() in TABLE_SUFFIXES:
            return _open_table(spec, column)
        if container_kind(name) is not None:
            return TreeSource(spec, clips=clips)
        is_image = has_input_suffix(os.fsencode(name), clips) or is_input(head, clips)
        # A URL with a query or a fragment names one file, and no directory.
        if is_image or name != spec:
            return TreeSource(spec)
        if is_url(spec):
            listing = list_remote_folder(spec)
            if listing is None:
                raise SourceError(
                    f"{spec} is not an image, archive or table, and web servers do not"
                    " list directories; give the URLs of files, or a file with a list"
                    " of URLs"
                )
            if not any(listing):
                raise SourceError(f"{spec} does not exist; check the URL")
            return TreeSource(spec, True, column, clips=clips)
    except (OSError, ValueError, EOFError, pa.ArrowException) as error:
        if isinstance(error, FileNotFoundError) and not is_url(spec):
            raise SourceError(f"{spec} does not exist; check the path") from error
        raise unreadable(spec, error) from error
    if is_input(head, clips=True):
        raise SourceError(
            f"{spec} is a video; set the number of frames per clip to index videos"
        )
    raise SourceError(f"{spec} is not a source of images; give {ACCEPTED}")


def _open_table(spec: str, column: str | None) -> TableSource:
    source = TableSource(spec, column=column)
    source.table.check()
    return source


def _refuse_credentials(url: str) -> None:
    if has_credentials(url):
        raise SourceError(
            f"{without_credentials(url)} contains a user name or a password, which the"
            " index would store; remove them from the URL, and put the credentials"
            " into the environment"
        )


def _matches(pattern: str) -> list[str]:
    """Return the sorted names that a pattern with wildcards matches. A name without
    wildcards is returned unchanged.
    """
    if not glob.has_magic(pattern) or os.path.exists(pattern):
        return [pattern]
    if not is_url(pattern):
        names = glob.glob(pattern, recursive=True)
    elif scheme_of(pattern) in WEB_SCHEMES:
        return [pattern]
    else:
        _refuse_credentials(pattern)
        parent, _, last = pattern.rpartition("/")
        if glob.has_magic(parent):
            raise SourceError(
                f"{pattern} has a wildcard in a directory; use wildcards only after the"
                " last slash"
            )
        require_libraries(pattern)
        try:
            files, _ = list_remote_folder(parent) or ({}, [])
        except (OSError, ValueError) as error:
            raise unreadable(pattern, error) from error
        names = [f"{parent}/{name}" for name in fnmatch.filter(files, last)]
    if not names:
        raise SourceError(f"no file matches {pattern}; check the pattern")
    return sorted(names, key=os.fsencode)


def expand_braces(pattern: str) -> list[str]:
    """Return all names that `pattern` expands to, in order. Braces are as in shells and
    WebDataset, for example `{0000..0127}` or `{train,val}`.

    A range can count down. If a bound of a range has a leading zero, such as `01`, all
    numbers of the range are padded with zeros to the width of the longer bound.
    """
    braces = _BRACES.search(pattern)
    if braces is None:
        return [pattern]
    if braces[3] is not None:
        choices = braces[3].split(",")
    else:
        start = int(braces[1])
        stop = int(braces[2])
        is_padded = any(re.match(r"-?0\d", bound) for bound in braces.groups()[:2])
        width = max(len(braces[1]), len(braces[2])) if is_padded else 0
        step = 1 if stop >= start else -1
        numbers = range(start, stop + step, step)[: MAX_EXPANSIONS + 1]
        choices = [f"{number:0{width}d}" for number in numbers]
    ends = expand_braces(pattern[braces.end() :])
    if len(choices) * len(ends) > MAX_EXPANSIONS:
        raise SourceError(
            f"{pattern} expands to more than {MAX_EXPANSIONS:,} names; give several"
            " smaller patterns"
        )
    start_text = pattern[: braces.start()]
    return [f"{start_text}{choice}{end}" for choice in choices for end in ends]


def _real_path(source: Source) -> bytes:
    return source.path if is_url(source.path) else os.path.realpath(source.path)


def _contained(sources: Sequence[Source]) -> Iterator[tuple[Source, Source]]:
    """Yield (source, other) for each source whose inputs `other` lists, too. Here,
    `other` is either the first source with the same path, or a directory that contains
    `source`.
    """
    source_of_path: dict[bytes, Source] = {}
    for source in sources:
        other = source_of_path.setdefault(_real_path(source), source)
        if other is not source:
            yield source, other
    folders = {
        path: source for path, source in source_of_path.items() if source.is_directory
    }
    # Directory -> names of its files, for directories that contain archives or Parquet
    # files from `sources`. A directory can contain thousands of them, but is listed
    # only once.
    names_in = functools.cache(lambda folder: os.listdir(os.fsencode(folder)))
    for path, source in source_of_path.items():
        parent = os.path.dirname(path)
        while parent not in folders and parent != os.path.dirname(parent):
            parent = os.path.dirname(parent)
        outer = folders.get(parent)
        if outer is None:
            continue
        # A directory source reads an archive or a Parquet file only if there are no
        # images or clips beside it, and no list.
        is_part = isinstance(source, TreeSource)
        if is_packed(source):
            is_part = not is_url(path) and not holds_inputs(
                names_in(os.path.dirname(path)), source.clips
            )
        if is_part:
            yield source, outer
