"""Verification of all files of an index."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.checksum import crc32c_stream
from storage_formats.format.committed_files import iter_shard_files
from storage_formats.format.index_files import open_index_file, read_index_file
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Counts, Manifest
from storage_formats.format.object_store import IndexLocation
from storage_formats.format.row_map import check_row_map
from storage_formats.format.shard_table import FileEntry, check_shard_tables
from storage_formats.format.tombstones import read_tombstones
from storage_formats.format.zarr_metadata import zarr_documents
from storage_formats.ordered_results import ordered_results
from storage_formats.shard_check import CheckedShard, Problem, ShardCheck, unreadable
from storage_formats.verified_files import VerifiedFiles, verified_files
from storage_formats.writing.publish import add_counts

_THREADS = 4  # also with fewer CPUs, because the threads mostly wait for data (docs/lab)
_MAX_ZARR_BYTES = 1 << 20
_SHARD_TABLE = re.compile(r"manifest/shards-[0-9a-f]{8}\.parquet")


def verify_index(
    root: IndexLocation, on_progress: Callable[[int, int], None] | None = None, *, sample: float | None = None
) -> list[Problem]:
    """Check every file of an index, or a random sample of its shards.

    Threads check up to four shards at the same time. The objects of an index on an object store are downloaded to the
    cache directory and removed. Only the shards that are being checked take disk space.

    Args:
        root: directory of the index, or its URL on an object store.
        on_progress: called as `on_progress(done, total)` after each shard. Both arguments are numbers of shards.
        sample: number of shards to check. Each call draws other shards at random. A number below 1 is a share of all
            shards. None checks everything. A sample skips three checks: the totals in `index.json`, the search for
            files that do not belong to the index, and the contents of the nearest-neighbour index.

    Returns:
        All problems that were found. The list is empty if the index, or the sample, is undamaged.

    Raises:
        UsageError: there is no index at `root`, `sample` is not positive, the disk has no room for a shard of an
            index on an object store, or the URL begins with `http://` or `https://`.
        IncompleteIndexError: the build of the index has not finished.
        ObjectStoreError: the object store refused a request or cannot be reached.

    Example:
        >>> from storage_formats import verify_index
        >>> from storage_formats.example import example_index
        >>> verify_index(example_index())
        []
    """
    return verify(root, on_progress, sample=sample).problems


@dataclass(frozen=True)
class Totals:
    """Totals over the rows tables: the numbers of inputs, and of values in each source column."""

    counts: Counts
    values: Counter[str]

    def plus(self, checked: CheckedShard) -> Totals:
        return Totals(add_counts(self.counts, checked.counts), self.values + Counter(checked.values))

    def problems(self, manifest: Manifest) -> Iterator[Problem]:
        """Yield a problem if the numbers in `manifest` differ from these totals."""
        if self.counts != manifest.counts:
            message = f"lists the counts {asdict(manifest.counts)}, but the rows tables have {asdict(self.counts)}"
            yield Problem("index.json", "counts", message)
            return
        for column in manifest.columns:
            values = self.values[column.name]
            if column.values != values:
                message = f"lists {column.values} values of column {column.name}, but the rows tables have {values}"
                yield Problem("index.json", "columns", message)


@dataclass(frozen=True)
class Verification:
    """The result of a verification, from which a second verification can continue.

    Attributes:
        problems: all problems that were found.
        manifest: manifest of the snapshot; None if not all of its files were checked.
        damaged_shards: numbers of the checked shards with problems, ascending.
        totals: totals over the rows tables of the checked shards without problems.
    """

    problems: list[Problem]
    manifest: Manifest | None = None
    damaged_shards: Sequence[int] = ()
    totals: Totals = field(default_factory=lambda: Totals(Counts(0, 0, 0), Counter()))

    def covers(self, manifest: Manifest) -> bool:
        """Return True if the shards of the snapshot `manifest` are those that were checked."""
        return self.manifest is not None and self.manifest.shard_tables == manifest.shard_tables

    def sound_ann(self) -> set[FileEntry]:
        """Return the entries of the files of the nearest-neighbour index that were read and have no problem."""
        damaged = {problem.path for problem in self.problems}
        return {entry for entry in self.manifest.ann_files if entry.path not in damaged} if self.manifest else set()


def verify(
    root: IndexLocation,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    sample: float | None = None,
    earlier: Verification | None = None,
) -> Verification:
    """Check an index like `verify_index`, or check again what an earlier verification found damaged.

    Args:
        root: as for `verify_index`.
        on_progress: as for `verify_index`.
        sample: as for `verify_index`.
        earlier: verification of all shards. The files that were sound then, and that the index still has, are not read
            again. None checks all files.
    """
    with contextlib.ExitStack() as opened:
        try:
            files = opened.enter_context(verified_files(root))
            manifest, version = Manifest.load(files.root), files.version()
        except CorruptIndexError as error:
            return Verification([Problem("index.json", "manifest", str(error))])
        if earlier is not None and earlier.covers(manifest):
            shards = earlier.damaged_shards
        else:
            shards, earlier = sampled_shards(manifest.spec, sample), Verification([])
        verification = _verify(files, manifest, on_progress, shards, earlier=earlier, checks_all=sample is None)
        problems = [files.describe(each) for each in verification.problems]
        if problems and files.version() != version:
            message = "changed while the index was verified; verify the index again"
            return Verification([Problem("index.json", "changed", message)])
    return replace(verification, problems=problems)


def _verify(
    files: VerifiedFiles,
    manifest: Manifest,
    on_progress: Callable[[int, int], None] | None,
    shards: Sequence[int],
    *,
    earlier: Verification,
    checks_all: bool,
) -> Verification:
    """Check `shards`, and all files that belong to no shard, apart from those that `earlier` found sound."""
    root, totals = files.root, earlier.totals
    damaged_shards: list[int] = []
    try:
        check_shard_tables(root, manifest.shard_tables)
        problems = list(_check_metadata(files, manifest.spec))
        with _checked(files, manifest, shards) as checked_shards:
            for done, checked in enumerate(checked_shards, 1):
                problems += checked.problems
                if checked.problems:
                    damaged_shards.append(checked.shard)
                else:
                    totals = totals.plus(checked)
                if on_progress:
                    on_progress(done, len(shards))
    except CorruptIndexError as error:
        return Verification([Problem("index.json", "manifest", str(error))])
    if checks_all and not problems:
        problems += totals.problems(manifest)
    problems += _check_tombstones(root, manifest)
    problems += _check_row_maps(root, manifest)
    if checks_all:
        problems += _check_strays(files, manifest)
    problems += _check_ann(files, manifest, to_read=set(manifest.ann_files) - earlier.sound_ann() if checks_all else ())
    return Verification(problems, manifest if checks_all else None, damaged_shards, totals)


@contextlib.contextmanager
def _checked(files: VerifiedFiles, manifest: Manifest, shards: Sequence[int]) -> Iterator[Iterator[CheckedShard]]:
    """Context manager that yields an iterator of the checked `shards`, in their order. Threads check them."""
    layout = Layout(files.root)

    def check(item: tuple[int, Mapping[str, FileEntry]]) -> CheckedShard:
        shard_check = ShardCheck(layout, manifest, *item)
        with files.at_hand(shard_check.files):
            return shard_check.run()

    with ThreadPoolExecutor(_THREADS, "edje-verify") as pool:
        try:
            entries = iter_shard_files(CommittedIndex(layout.root, manifest), shards)
            yield ordered_results(entries, lambda item: pool.submit(check, item), ahead=2 * _THREADS)
        except BaseException:
            files.abandon()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def sampled_shards(spec: IndexSpec, sample: float | None) -> Sequence[int]:
    """Return the numbers of the shards to verify, ascending: all shards, or a random sample of them.

    Args:
        spec: shape of the index.
        sample: number of shards. A number below 1 is a share of all shards, rounded up. None returns all shards.

    Raises:
        UsageError: `sample` is not positive.
    """
    ranges = [spec.segment_shards(segment) for segment in spec.used_segments]
    total = sum(map(len, ranges))
    if sample is None:
        return list(spec.shard_numbers())
    if not 0 < sample < math.inf:
        raise UsageError(
            f"sample must be above 0, got {sample}; give a number of shards or a share below 1", parameter="sample"
        )
    count = min(math.ceil(sample * total if sample < 1 else sample), total)
    firsts = list(itertools.accumulate(map(len, ranges), initial=0))
    positions = sorted(random.sample(range(total), count))
    segments = [bisect.bisect_right(firsts, position) - 1 for position in positions]
    return [ranges[at][position - firsts[at]] for at, position in zip(segments, positions, strict=True)]


def _check_metadata(files: VerifiedFiles, spec: IndexSpec) -> Iterator[Problem]:
    """Compare each `zarr.json` with SPEC.md, and check that zarr-python can open the arrays."""
    layout, is_changing = Layout(files.root), files.is_changing()
    for path, document in zarr_documents(layout, spec).items():
        where = layout.relative(path)
        try:
            actual = json.loads(read_index_file(layout.root, path, max_bytes=_MAX_ZARR_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            yield Problem(where, "zarr-metadata", f"cannot be read: {error}")
            continue
        if is_changing and _differs_in_rows(actual, document):
            continue
        if actual != document:
            yield Problem(where, "zarr-metadata", "is not the document that SPEC.md prescribes for this manifest")
        elif document["node_type"] == "array":
            yield from _check_stock_reader(path.parent, where, document)


def _differs_in_rows(actual: Any, document: dict[str, Any]) -> bool:
    """Return True if two Zarr documents differ only in the number of rows, which happens during an append."""
    try:
        rows, *record_shape = actual["shape"]
        expected_rows = document["shape"][0]
    except (KeyError, TypeError, ValueError):
        return False
    same_otherwise = {**actual, "shape": [expected_rows, *record_shape]} == document
    return same_otherwise and isinstance(rows, int) and rows > 0 and rows != expected_rows


def _check_stock_reader(array_dir: Path, where: str, document: dict[str, Any]) -> Iterator[Problem]:
    try:
        import zarr
    except ModuleNotFoundError:  # a light installation; the caller has compared the document with SPEC.md
        return
    try:
        array = zarr.open_array(str(array_dir), mode="r")
    except Exception as error:  # a third-party reader may raise anything
        yield Problem(where, "zarr-reader", f"cannot be opened by zarr-python: {error}")
        return
    if list(array.shape) != document["shape"] or str(array.dtype) != document["data_type"]:
        expected = f"{document['data_type']} {document['shape']}"
        message = f"is read by zarr-python as {array.dtype} {list(array.shape)} instead of {expected}"
        yield Problem(where, "zarr-reader", message)


def _check_tombstones(root: str | Path, manifest: Manifest) -> Iterator[Problem]:
    try:
        read_tombstones(Path(root), manifest.spec, manifest.snapshot)
    except CorruptIndexError as error:
        yield Problem(manifest.snapshot.deleted.path if manifest.snapshot.deleted else "", "deleted-rows", str(error))


def _check_row_maps(root: str | Path, manifest: Manifest) -> Iterator[Problem]:
    for row_map in manifest.row_maps:
        try:
            check_row_map(CommittedIndex(Path(root), manifest), row_map)
        except CorruptIndexError as error:
            yield Problem(row_map.file.path, "row-map", str(error))


def _check_strays(files: VerifiedFiles, manifest: Manifest) -> Iterator[Problem]:
    """Yield a problem for each data file that belongs to no snapshot and no unfinished change."""
    if files.is_changing():  # they may be files of the change; the next change finishes it or removes them
        return
    try:
        named = files.named(manifest)
    except CorruptIndexError as error:
        yield Problem("snapshots", "snapshot", f"contains a snapshot that cannot be read: {error}")
        return
    for where in files.names():
        is_table = _SHARD_TABLE.fullmatch(where) is not None  # a conversion keeps the earlier shard tables
        belongs = where.endswith("/zarr.json") or is_table or where in named
        if not belongs:
            yield Problem(where, "stray-file", files.stray_message)


def _check_ann(files: VerifiedFiles, manifest: Manifest, *, to_read: Container[FileEntry]) -> Iterator[Problem]:
    for entry in manifest.ann_files:
        try:
            is_sound = files.length(entry.path) == entry.bytes
            if is_sound and entry in to_read:
                with files.at_hand({entry.path: entry}), open_index_file(files.root, files.root / entry.path) as file:
                    is_sound = crc32c_stream(file) == entry.crc32c
        except OSError as error:
            yield unreadable(entry.path, error)
            continue
        if not is_sound:
            yield Problem(entry.path, "checksum", "is not the committed file; build the nearest-neighbour index again")
    vectors = manifest.ann.get("vectors")
    if vectors is not None and vectors != manifest.counts.indexed:
        yield Problem("ann", "counts", f"has {vectors} vectors, but {manifest.counts.indexed} rows are indexed")
