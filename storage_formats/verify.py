"""Verification of all files of an index."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage_formats.arrays import Bools
from storage_formats.cache import cache_directory
from storage_formats.codecs import Codec, codec, fill_record
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.checksum import crc32c_rows, read_checksums
from storage_formats.format.file_check import FileEntry, Problem, check_file
from storage_formats.format.index_files import IndexFile
from storage_formats.format.layout import (
    EMBEDDING_FILE,
    ROOT,
    IndexSpec,
    Layout,
    checksum_file,
    padded_shard_bytes,
    token_file,
)
from storage_formats.format.manifest import (
    CommittedIndex,
    Counts,
    kept_snapshots,
    named_files,
)
from storage_formats.format.places import open_place
from storage_formats.format.rows import (
    INDEXED,
    count_rows,
    iter_row_groups,
)
from storage_formats.format.zarr_metadata import shard_index_bytes, zarr_documents
from storage_formats.reading.embeddings import read_shard_embeddings
from storage_formats.remote.urls import IndexLocation, is_url
from storage_formats.threads import ordered_map
from storage_formats.writing.publish import add_counts

# Four threads are used on a machine with fewer CPUs, too, because they mostly wait for
# data (docs/lab/fetch.md).
_THREADS = 4
_MAX_ZARR_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20
_PROBLEMS_SHOWN = 3
# the columns of the rows with which the other files of a shard are compared
_COLUMNS = ["status", "reason"]
# Files that no snapshot names: a conversion leaves the earlier shard tables for readers
# that have the index open.
_LEFT_BEHIND = re.compile(r"manifest/shards-[0-9a-f]{8}\.parquet")


def verify_index(
    root: IndexLocation,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[Problem]:
    """Check every file of all kept snapshots of an index.

    Four threads check one shard each at a time. For an index on an object store, the
    objects of a shard are downloaded to the cache directory, checked, and removed, so
    that only the shards that are being checked take disk space.

    Args:
        root: directory of the index, or its URL on an object store.
        on_progress: called as `on_progress("verifying", done, total)` after each shard
            of the current snapshot, with numbers of shards.

    Returns:
        All problems that were found. The list is empty if all files are undamaged.

    Raises:
        UsageError: there is no index at `root`, the disk has no room for a shard of an
            index on an object store, or the URL begins with `http://` or `https://`.
        IncompleteIndexError: the build of the index has not finished.
        ObjectStoreError: the object store refused a request or cannot be reached.

    Examples:
        >>> from storage_formats import verify_index
        >>> verify_index("photos.edje")
        []
    """
    with contextlib.ExitStack() as opened:
        try:
            index = opened.enter_context(_opened(root))
        except CorruptIndexError as error:
            return [Problem(ROOT, "manifest", str(error))]
        version = _version(index)
        try:
            problems = _problems(index, on_progress)
        except CorruptIndexError as error:
            problems = [Problem(ROOT, "manifest", str(error))]
        if problems and _version(index) != version:
            return [
                Problem(
                    ROOT,
                    "changed",
                    "changed while the index was verified; verify the index again",
                )
            ]
    # An index at a URL is checked in a temporary directory, whose path means nothing to
    # users. The messages name the URL instead.
    return [
        replace(
            each, message=each.message.replace(str(index.root), str(index.location))
        )
        for each in problems
    ]


@contextlib.contextmanager
def _opened(location: IndexLocation) -> Iterator[CommittedIndex]:
    """Context manager that opens an index. An index at a URL gets a new, empty local
    directory, so that every object is downloaded and checked, and no cached file is
    used.
    """
    if not is_url(location):
        yield CommittedIndex.open(location)
        return
    try:
        with open_place(location) as place:
            yield CommittedIndex.at(place)
    except OSError as error:
        # An OSError here comes from the local disk: unreadable files of the index are
        # returned as problems, and errors of the object store are not OSErrors.
        raise UsageError(
            f"cannot write to {cache_directory()}: {error.strerror}; free some space,"
            " or set EDJE_CACHE to another directory"
        ) from error


def _version(index: CommittedIndex) -> tuple[bytes | None, list[Path]]:
    """Return the current contents of `index.json` and the names of the manifests of
    earlier snapshots. After a change of the index, the result is different.
    """
    place = index.place
    return place.read(place.manifest), place.names(place.snapshots)


def _problems(
    index: CommittedIndex, on_progress: Callable[[str, int, int], None] | None
) -> list[Problem]:
    """Return all problems of an open index. For the arguments, see `verify_index`."""
    manifest = index.manifest
    spec = manifest.spec
    files_of_shards = index.shard_files()
    # problems of the contents of tables, which matter if the files are not damaged
    contents: list[Problem] = []

    def items() -> Iterator[tuple[int, dict[str, FileEntry], pa.Table | None]]:
        for position, rows_file in enumerate(manifest.rows_files):
            rows = None
            with _reporting(contents, rows_file.file, "rows"):
                groups = iter_row_groups(index, files=[position])
                # Long reasons are kept once.
                rows = pa.concat_tables(
                    pa.table(
                        {name: each[name].dictionary_encode() for name in _COLUMNS}
                    )
                    for each in groups
                )
            done = 0
            for shard in range(rows_file.first_shard, manifest.stop_shard(position)):
                count = len(spec.shard_rows(shard))
                if count:
                    of_shard = None if rows is None else rows.slice(done, count)
                    yield shard, files_of_shards[shard], of_shard
                done += count

    problems = list(_check_metadata(index))
    counts = Counts(0, 0, 0)
    check = functools.partial(check_shard, index)
    checked = ordered_map(check, items(), _THREADS, 2 * _THREADS)
    for done, (shard_problems, shard_counts) in enumerate(checked, 1):
        problems += shard_problems
        counts = add_counts(counts, shard_counts)
        if on_progress:
            on_progress("verifying", done, len(files_of_shards))
    # If a rows file cannot be read, its rows are missing from `counts`, so the totals
    # cannot be compared.
    is_complete = counts.inputs == spec.used_rows
    if is_complete and counts != manifest.counts:
        message = (
            f"lists the counts {asdict(manifest.counts)}, but the rows have"
            f" {asdict(counts)}"
        )
        problems.append(Problem(ROOT, "counts", message))
    by_shard = {file for files in files_of_shards.values() for file in files.values()}
    problems += _check_other_files(index, by_shard)
    with _reporting(contents, manifest.snapshot.deleted, "deleted-rows"):
        _ = index.deleted
    with _reporting(contents, manifest.removed, "removed-inputs"):
        _ = index.removed
    damaged = {problem.path for problem in problems}
    problems += [each for each in contents if each.path not in damaged]
    vectors = manifest.ann.get("vectors")
    has_all_rows = "rows" not in manifest.ann
    if has_all_rows and vectors is not None and vectors != manifest.counts.indexed:
        message = (
            f"has {vectors} vectors, but {manifest.counts.indexed} rows are indexed"
        )
        problems.append(Problem("ann", "counts", message))
    return problems


def check_shard(
    index: CommittedIndex,
    item: tuple[int, Mapping[str, FileEntry], pa.Table | None],
) -> tuple[list[Problem], Counts]:
    """Check all files of a shard. If the index is on an object store, they are
    downloaded first.

    Args:
        item: (shard number, entries of the files of the shard, keyed by path, columns
            `_COLUMNS` of its rows, or None if they cannot be read).

    Returns:
        The problems, and the counts of the inputs of the shard. If its rows cannot be
        read, all counts are 0.
    """
    shard, files, rows = item
    layout = index.layout
    spec = index.spec
    codecs = [codec(name, spec.block_shape) for name in spec.precisions]
    expected = [EMBEDDING_FILE]
    for each in codecs:
        expected += [token_file(each.name, len(each.record_shape))]
        expected += [checksum_file(each.name)]
    expected = [name.format(shard) for name in expected]
    problems = [
        Problem(path, "shard-table", "is not listed in the shard table")
        for path in expected
        if path not in files
    ]
    problems += [
        Problem(
            path,
            "shard-table",
            "is in the shard table, but does not belong to this index",
        )
        for path in sorted(files.keys() - {*expected})
    ]
    counts = Counts(0, 0, 0)
    indexed = None
    if rows is not None:
        counts = count_rows(rows)
        indexed = np.array([each == INDEXED for each in rows["status"].to_pylist()])
        if problem_of_counts := counts.problem():
            where = f"shard {shard} of the rows"
            problems.append(Problem(where, "counts", problem_of_counts))
    listed = [files[path] for path in expected if path in files]
    with files_here(index, listed):
        problems += filter(None, [check_file(layout.root, entry) for entry in listed])
        if indexed is not None:
            for each in codecs:
                problems += _check_tokens(layout, spec, shard, each, indexed)
            problems += _check_embeddings(layout, spec, shard, indexed)
    return problems, counts


def _check_tokens(
    layout: Layout, spec: IndexSpec, shard: int, token_codec: Codec, indexed: Bools
) -> Iterator[Problem]:
    """Check each record of a token file against its CRC-32C, and the holes and the
    shard index against the rows table.

    Args:
        indexed: bool [rows], which rows of the shard are indexed.
    """
    name = token_file(token_codec.name, len(token_codec.record_shape))
    where = name.format(shard)
    rows = spec.shard_rows(shard)
    size = token_codec.record_bytes
    index_offset, length = padded_shard_bytes(len(rows), spec.shard_size, size)
    step = max(1, _PIECE_BYTES // size)
    try:
        checksums = read_checksums(layout, token_codec.name, shard, len(rows))
        with IndexFile(layout.root, layout.root / where) as file:
            if os.fstat(file.fileno()).st_size != length:
                # `check_file` reports the wrong length.
                return
            fill = fill_record(token_codec)
            for first in range(0, len(rows), step):
                stop = min(first + step, len(rows))
                data = file.read((stop - first) * size)
                records = np.frombuffer(data, np.uint8).reshape(-1, size)
                for position in np.flatnonzero(
                    crc32c_rows(records) != checksums[first:stop]
                ):
                    row_id = rows[first + position]
                    message = f"has a damaged block for row {row_id}"
                    yield Problem(where, "block-checksum", message)
                holes = np.flatnonzero(~indexed[first:stop])
                for position in holes[(records[holes] != fill).any(axis=1)]:
                    row_id = rows[first + position]
                    message = f"has data for row {row_id}, which is a hole"
                    yield Problem(where, "hole", message)
            file.seek(index_offset)
            index = file.read()
    except (OSError, CorruptIndexError):
        # `check_file` reports files that cannot be read.
        return
    present = np.zeros(spec.shard_size, dtype=np.bool_)
    present[: len(rows)] = indexed
    if index != shard_index_bytes(present, size):
        yield Problem(
            where, "shard-index", "has a shard index that does not match the rows table"
        )


def _check_embeddings(
    layout: Layout, spec: IndexSpec, shard: int, indexed: Bools
) -> Iterator[Problem]:
    """Check that the rows `indexed`, bool [rows], have embeddings, and that all other
    rows have none.
    """
    where = EMBEDDING_FILE.format(shard)
    try:
        values = read_shard_embeddings(layout, spec, shard)
    except CorruptIndexError:
        # `check_file` reports the damaged file.
        return
    finite = np.asarray(np.isfinite(values).all(axis=1))
    for position in np.flatnonzero(finite != indexed):
        row_id = spec.shard_rows(shard).start + position
        problem = "an embedding for row {}, which is a hole"
        if not finite[position]:
            problem = "no embedding for row {}, which is indexed"
        yield Problem(where, "embedding", f"has {problem.format(row_id)}")


@contextlib.contextmanager
def _reporting(
    problems: list[Problem], entry: FileEntry | None, code: str
) -> Iterator[None]:
    """Context manager that adds a problem of the kind `code` to `problems` if its code,
    which reads the file `entry`, finds damage.
    """
    try:
        yield
    except CorruptIndexError as error:
        message = f"cannot be read: {error.__cause__ or error}"
        problems.append(Problem(entry.path if entry else ROOT, code, message))


@contextlib.contextmanager
def files_here(index: CommittedIndex, entries: Collection[FileEntry]) -> Iterator[None]:
    """Context manager in which the files `entries` of `index` are on this machine.

    Objects of an object store are downloaded, even if they are damaged, so that
    `check_file` can report them. The local files are removed at the end.
    """
    if index.remote is None:
        yield
        return
    paths = [index.root / entry.path for entry in entries]
    try:
        for entry, path in zip(entries, paths, strict=True):
            info = index.remote.info(entry.path)
            if info is None:
                # The object does not exist. `check_file` reports the missing file.
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            # The object may have been removed or shortened since `info` was read.
            # `check_file` then reports the incomplete file.
            gone = contextlib.suppress(FileNotFoundError, EOFError)
            with open(path, "wb") as file, gone:
                if info.size > entry.bytes:
                    file.truncate(info.size)
                else:
                    file.writelines(index.remote.chunks(entry.path, info.size))
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _check_metadata(index: CommittedIndex) -> Iterator[Problem]:
    """Compare each `zarr.json` with the document that SPEC.md prescribes."""
    layout = index.layout
    is_changing = index.place.is_changing()
    for path, document in zarr_documents(layout, index.spec).items():
        where = layout.relative(path)
        try:
            data = index.place.read(path, _MAX_ZARR_BYTES)
            actual = None if data is None else json.loads(data)
        except (OSError, ValueError, RecursionError) as error:
            yield Problem(where, "zarr-metadata", f"cannot be read: {error}")
            continue
        if data is None:
            yield Problem(where, "zarr-metadata", "does not exist")
            continue
        shape = document.get("shape")
        if (
            is_changing
            and shape
            and isinstance(actual, dict)
            and isinstance(actual.get("shape"), list)
        ):
            # A change that adds rows writes the new number of rows to `zarr.json`
            # before its commit, so this number is not compared during a change.
            actual["shape"][:1] = shape[:1]
        if actual != document:
            yield Problem(
                where,
                "zarr-metadata",
                "is not the document that SPEC.md prescribes for this manifest",
            )


def _check_files(
    index: CommittedIndex, entries: Iterable[FileEntry]
) -> Iterator[Problem]:
    """Compare the length and the CRC-32C of each file or object of `entries` with its
    entry, in several threads. Yield the problems, sorted by path.
    """

    def check(entry: FileEntry) -> Problem | None:
        with files_here(index, [entry]):
            return check_file(index.root, entry)

    ordered = sorted(entries, key=lambda entry: entry.path)
    yield from filter(None, ordered_map(check, ordered, _THREADS, 2 * _THREADS))


def check_files(index: CommittedIndex, *, only_lengths: bool) -> None:
    """Compare the lengths and the checksums of all files of a snapshot with their
    entries.

    Args:
        only_lengths: True does not compare checksums, but checks each `zarr.json`.

    Raises:
        CorruptIndexError: a file is missing or differs from its entry.
    """
    entries = list(named_files(index))
    found: list[Problem] = []
    if only_lengths:
        lengths = index.place.lengths(entries)
        entries = [each for each in entries if lengths.get(each.path) != each.bytes]
        found += _check_metadata(index)
    found += _check_files(index, entries)
    if found:
        shown = [f"{each.path} {each.message}" for each in found[:_PROBLEMS_SHOWN]]
        raise CorruptIndexError(
            f"snapshot {index.manifest.snapshot.number} of {index.location} is finished"
            f" but damaged: {'; '.join(shown)} (problems: {len(found):,}). Restore the"
            " damaged files from a backup, or build the index again",
            remedy="verify",
        )


def _check_other_files(
    index: CommittedIndex, by_shard: Set[FileEntry]
) -> Iterator[Problem]:
    """Check each file of the kept snapshots that `check_shard` does not check, and look
    for data files that no snapshot names.

    Args:
        by_shard: entries of the files that `check_shard` checks.
    """
    place = index.place
    try:
        manifests = kept_snapshots(index)
        named = {*named_files(index, manifests)}
    except (CorruptIndexError, UsageError) as error:
        # A snapshot whose format version is not supported raises a UsageError.
        yield Problem(
            "snapshots", "snapshot", f"contains a snapshot that cannot be read: {error}"
        )
        yield from _check_files(index, index.manifest.own_files)
        return
    yield from _check_files(index, named - by_shard)
    # If a change is unfinished, files that no snapshot names may belong to it. They are
    # not reported, because the next change commits or removes them.
    if place.is_changing():
        return
    if index.remote is None:
        current = index.manifest.snapshot
        numbers = {manifest.snapshot.number for manifest in manifests}
        expected = range(
            current.number if current.oldest is None else current.oldest, current.number
        )
        lost = next((number for number in expected if number not in numbers), None)
        # A copy of an index holds only one snapshot, and has no directory `snapshots/`.
        if lost is not None and place.snapshots.exists():
            yield Problem(
                place.relative(place.snapshot(lost)),
                "missing-file",
                "cannot be read: it does not exist",
            )
    expected_paths = {entry.path for entry in named}
    for each in manifests:
        expected_paths.update(map(place.relative, zarr_documents(place, each.spec)))
    for folder in place.data_folders():
        try:
            paths = place.names(folder)
        except OSError as error:
            text = f"cannot be listed: {error.strerror}"
            yield Problem(place.relative(folder), "missing-file", text)
            continue
        for where in map(place.relative, paths):
            if where not in expected_paths and not _LEFT_BEHIND.fullmatch(where):
                yield Problem(
                    where, "stray-file", "does not belong to this index; delete it"
                )
