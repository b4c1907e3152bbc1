"""Compares the sources with the rows of an index, for an update. A source that seems lost is never taken for empty."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edje_index.images.inputs import InputRef, display_path, rows_digest
from edje_index.images.remote.urls import is_remote
from pipelines.jobs.plan import SourceGroup, holds_clips, recorded_sources
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage
from pipelines.progress.wording import counted
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.rows import DUPLICATE, FAILED, iter_rows

if TYPE_CHECKING:
    from pipelines.sources import Source
    from storage_formats.format.manifest import CommittedIndex


@dataclass(frozen=True)
class NewInputs:
    """The inputs that get new rows.

    Attributes:
        refs: inputs in row order.
        digest: SHA-256 of the inputs, in hexadecimal; see `Plan.inputs_digest`.
        duplicates: number of inputs that get no row, because the index or an earlier input has the same content.
        ignored: number of entries in the sources that are not inputs, by suffix or reason.
    """

    refs: list[InputRef]
    digest: str
    duplicates: int
    ignored: dict[str, int]


_COLUMNS = ("row_id", "uri", "uri_raw", "content_hash", "status", "reason", "duplicate_of")
_CAN_WORK_NOW = frozenset({"changed-since-plan", "original-deleted"})  # the file itself may be sound


@dataclass(slots=True)
class StoredRow:
    """One row of an index.

    Attributes:
        row_id: row id.
        content_hash: SHA-256 of the input, 32 bytes; None if the input could not be read.
        failed_for: reason why the row failed; None if the row has not failed.
        duplicate_of: row id of the original if this row is a duplicate, otherwise None.
        next_of_name: the next row with the same name, in row order; None if there is none.
    """

    row_id: int
    content_hash: bytes | None
    failed_for: str | None
    duplicate_of: int | None
    next_of_name: StoredRow | None = None

    def is_of(self, ref: InputRef) -> bool:
        """Return True if an update keeps this row for the input `ref`, which has the same name."""
        if ref.content_hash is None or self.content_hash is None:
            return self.failed_for is not None and self.failed_for == ref.problem
        return self.content_hash == bytes.fromhex(ref.content_hash) and self.failed_for not in _CAN_WORK_NOW


class StoredRows:
    """The rows of an index that are not deleted. Memory use is about 400 bytes per row.

    Attributes:
        rows: number of rows when the index was read.
    """

    def __init__(self, index: CommittedIndex) -> None:
        self._of_name: dict[bytes, StoredRow] = {}
        self.rows = 0
        last_of_name: dict[bytes, StoredRow] = {}  # only of names with several rows
        for table in iter_rows(index, _COLUMNS):
            for line in table.to_pylist():
                self._add(line, last_of_name)
                self.rows += 1

    def _add(self, line: dict[str, Any], last_of_name: dict[bytes, StoredRow]) -> None:
        content_hash = line["content_hash"]
        row = StoredRow(
            row_id=line["row_id"],
            content_hash=None if content_hash is None else bytes.fromhex(content_hash),
            failed_for=line["reason"] if line["status"] == FAILED else None,
            duplicate_of=line["duplicate_of"] if line["status"] == DUPLICATE else None,
        )
        name = _name(line["uri"], line["uri_raw"])
        first = self._of_name.setdefault(name, row)
        if first is not row:
            last_of_name.get(name, first).next_of_name = row
            last_of_name[name] = row

    def take(self, ref: InputRef) -> StoredRow | None:
        """Remove and return the row with the name and content of `ref`; None if no row matches."""
        name = ref_name(ref)
        before, row = None, self._of_name.get(name)
        while row is not None and not row.is_of(ref):
            before, row = row, row.next_of_name
        if row is not None:
            self._remove(name, before, row)
        return row

    def take_named(self, ref: InputRef) -> StoredRow | None:
        """Remove and return the first row with the name of `ref` and any content; None if no row matches."""
        name = ref_name(ref)
        row = self._of_name.get(name)
        if row is not None:
            self._remove(name, None, row)
        return row

    def take_rows(self, row_ids: Set[int]) -> list[StoredRow]:
        """Remove and return the rows with the ids `row_ids`. Ids of other rows are ignored."""
        taken = []
        for name, first in list(self._of_name.items()):
            before: StoredRow | None = None
            row: StoredRow | None = first
            while row is not None:
                following = row.next_of_name
                if row.row_id in row_ids:
                    self._remove(name, before, row)
                    taken.append(row)
                else:
                    before = row
                row = following
        return taken

    def _remove(self, name: bytes, before: StoredRow | None, row: StoredRow) -> None:
        if before is not None:
            before.next_of_name = row.next_of_name
        elif row.next_of_name is not None:
            self._of_name[name] = row.next_of_name
        else:
            del self._of_name[name]
        row.next_of_name = None

    def __iter__(self) -> Iterator[StoredRow]:
        """Yield the rows that `take` and `take_named` have not removed."""
        for first in self._of_name.values():
            row: StoredRow | None = first
            while row is not None:
                yield row
                row = row.next_of_name


def ref_name(ref: InputRef) -> bytes:
    """Return a hash of the name of an input. An input and its row have the same hash."""
    return _name(ref.uri, ref.uri_raw)


def _name(uri: str, uri_raw: bytes | None) -> bytes:
    return hashlib.blake2b(b"\0".join((uri.encode(), uri_raw or b"")), digest_size=16).digest()


_HIDES_OTHERS = frozenset({"missing", "unreadable", "truncated-archive", "damaged-archive"})
"""Problems of a directory or an archive after which its inputs cannot be listed."""


@dataclass(frozen=True)
class SourceChanges:
    """The differences between the sources and the rows of an index.

    Attributes:
        inputs: number of inputs in the sources.
        unchanged: number of inputs whose row does not change.
        new: inputs that get new rows, in the order of the sources.
        changed: positions in `new.refs` of the inputs that have a row with other content.
        vanished: number of rows whose input no longer exists.
        deleted: ids of the rows to delete, int64 [n], ascending: vanished rows, and old rows of changed inputs.
        reasons: why the rows to delete had failed, if failed inputs are tried again.
    """

    inputs: int
    unchanged: int
    new: NewInputs
    changed: tuple[int, ...]
    vanished: int
    deleted: NDArray[np.int64]
    reasons: tuple[str, ...] = ()


def compare_sources(
    index: CommittedIndex,
    group: SourceGroup | None,
    max_vanished: float,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> SourceChanges:
    """List the sources and compare every input with the rows of `index`. Nothing is written.

    Args:
        index: the index.
        group: all sources of the index; None takes those that the index records.
        max_vanished: largest share of rows whose input may no longer exist, 0 to 1.
        on_event: receives the events of the listing.
        should_stop: called before each input.

    An input is compared with the row of the same name. The row is unchanged if the content is the same too.

    Raises:
        UsageError: a source cannot be used, or the index does not record its sources and `group` is None.
        EdjeError: a source or a part of a source cannot be read.
        VanishedInputsError: the share of rows whose input no longer exists is larger than `max_vanished`.
        TransientInputError: an input cannot be read for a temporary reason.
        JobStopped: `should_stop()` returned True.
    """
    from pipelines.sources import count_ignored, digested, hashed, iter_all, open_sources

    clips = holds_clips(index.manifest)
    if group is not None:
        sources = open_sources(group.sources, group.column, clips=clips)
    else:
        sources = open_recorded(recorded_sources(index.manifest), clips=clips)
    comparison = _Comparison(StoredRows(index))
    for ref in hashed(digested(iter_all(sources), hashlib.sha256(), on_event, should_stop)):
        comparison.add(ref)
    comparison.finish()
    if comparison.unreachable:
        inputs = counted(comparison.unreachable, "input")
        on_event(StatusMessage(f"{inputs} on servers cannot be read now; the rows stay", is_warning=True))
    changes = comparison.changes(count_ignored(sources))
    _refuse_unreadable(comparison)
    empty = [display_path(source.path) for source in sources if not source.inputs]
    _refuse_hidden_rows(index, comparison, [] if max_vanished >= 1 else empty)
    _refuse_many_vanished(max_vanished, comparison, changes.vanished)
    return changes


@dataclass
class _Pending:
    """An input, and the row with the same name; the row is None if no row has this name."""

    position: int
    ref: InputRef
    row: StoredRow | None = None


class _Comparison:
    """Pairs each input with a row of the same name and content, or else with a row of the same name.

    A duplicate row is kept only if the row of its original is kept too. Otherwise its input gets a new row. If the
    input cannot be read now, the duplicate row and the row of its original are kept.

    Attributes:
        inputs: number of inputs.
        kept: rows that have an input of the same name and content, or whose input cannot be read now.
        kept_originals: other rows that are kept, because an input that cannot be read now is a duplicate of them.
        pending: inputs that have no row of the same name and content, in the order of the sources.
        hidden: the problem of each directory or archive that could not be read, by path.
        unreachable: number of inputs on servers that cannot be read now. Their rows are kept.
    """

    def __init__(self, stored: StoredRows) -> None:
        self.stored = stored
        self.inputs = 0
        self.kept: list[StoredRow] = []
        self.kept_originals: list[StoredRow] = []
        self.pending: list[_Pending] = []
        self.hidden: dict[str, str] = {}
        self.unreachable = 0
        self._duplicates: list[_Pending] = []

    def add(self, ref: InputRef) -> None:
        """Add the next input. Pair the input with a row of the same name and content if there is one."""
        row = self.stored.take(ref)
        if row is None:
            self.pending.append(_Pending(self.inputs, ref))
        elif row.duplicate_of is not None:
            self._duplicates.append(_Pending(self.inputs, ref, row))
        else:
            self.kept.append(row)
        if ref.problem in _HIDES_OTHERS:
            self.hidden[display_path(ref.path)] = str(ref.problem)
        self.inputs += 1

    def finish(self) -> None:
        """Pair the remaining inputs with rows of the same name. Call this method once, after the last `add`."""
        self._keep_unreachable()
        originals = {row.row_id for row in (*self.kept, *self.kept_originals)} if self._duplicates else set()
        for each in self._duplicates:
            if each.row is not None and each.row.duplicate_of in originals:
                self.kept.append(each.row)
            else:
                self.pending.append(each)
        self.pending.sort(key=lambda each: each.position)
        for each in self.pending:
            each.row = each.row or self.stored.take_named(each.ref)

    def _keep_unreachable(self) -> None:
        """Keep the rows of inputs whose server does not respond or refuses the request. Failed rows are not kept."""
        pending, self.pending = self.pending, []
        originals: set[int] = set()
        for each in pending:
            is_refused = each.ref.problem == "unreadable" and is_remote(each.ref.path)
            row = self.stored.take_named(each.ref) if is_refused or each.ref.problem == "unreachable" else None
            if row is None or row.failed_for is not None:
                self.pending.append(dataclasses.replace(each, row=row))
                continue
            self.unreachable += 1
            self.kept.append(row)
            if row.duplicate_of is not None:
                originals.add(row.duplicate_of)
        self.kept_originals = self.stored.take_rows(originals) if originals else []

    def changes(self, ignored: dict[str, int]) -> SourceChanges:
        """Return the changes that make the rows match the inputs."""
        hashes = {each.ref.content_hash for each in self.pending}
        kept = (*self.kept, *self.kept_originals)
        held = {row.content_hash.hex() for row in kept if row.content_hash is not None} & hashes
        refs: list[InputRef] = []
        changed: list[int] = []
        for each in self.pending:
            if each.ref.content_hash in held:
                continue
            if each.ref.content_hash is not None:
                held.add(each.ref.content_hash)
            if each.row is not None:
                changed.append(len(refs))
            refs.append(each.ref)
        vanished = [row.row_id for row in self.stored]
        replaced = [each.row.row_id for each in self.pending if each.row is not None]
        return SourceChanges(
            inputs=self.inputs,
            unchanged=len(self.kept),
            new=NewInputs(refs, rows_digest(refs), len(self.pending) - len(refs), ignored),
            changed=tuple(changed),
            vanished=len(vanished),
            deleted=np.array(sorted((*vanished, *replaced)), dtype=np.int64),
        )


def _refuse_unreadable(comparison: _Comparison) -> None:
    """Raise EdjeError if the input of an existing row exists but cannot be read."""
    for each in comparison.pending:
        if each.ref.problem == "unreadable" and each.row is not None and each.row.failed_for is None:
            raise EdjeError(
                f"cannot read {each.ref.uri}, which is row {each.row.row_id} of the index; make the file readable, or "
                "delete the row and the file. The index is unchanged"
            )


def _refuse_hidden_rows(index: CommittedIndex, comparison: _Comparison, empty_sources: list[str]) -> None:
    """Raise EdjeError if rows have lost their inputs because a directory or archive is empty or cannot be read."""
    hidden = {**dict.fromkeys(empty_sources, "it lists no images"), **comparison.hidden}
    vanished = {row.row_id for row in comparison.stored}
    for each in comparison.pending:
        if each.ref.problem in _HIDES_OTHERS and each.row is not None and each.row.failed_for is None:
            vanished.add(each.row.row_id)  # the first input that is cut off has the problem of its archive
    if not hidden or not vanished:
        return
    below: dict[str, int] = {}
    for table in iter_rows(index, ["row_id", "uri"]):
        for line in table.to_pylist():
            container = _container_of(line["uri"], hidden) if line["row_id"] in vanished else None
            if container is not None:
                below[container] = below.get(container, 0) + 1
    for container, rows in below.items():
        raise EdjeError(
            f"cannot compare {container} with the index ({hidden[container]}). The index has "
            f"{counted(rows, 'row')} from {container}; check that it is mounted and readable. The index is unchanged"
        )


def _container_of(uri: str, hidden: Iterable[str]) -> str | None:
    """Return the directory or archive in `hidden` that contains the input `uri`; None if there is none."""
    ends = (position for position, letter in enumerate(uri) if letter in "/!")
    return next((uri[:end] for end in ends if uri[:end] in hidden), None)


class VanishedInputsError(EdjeError):
    """The inputs of more rows vanished than allowed.

    Attributes:
        problem: the error message without advice.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"{problem}; check the sources, or raise max_vanished to delete these rows. The index is unchanged"
        )
        self.problem = problem


def _refuse_many_vanished(max_vanished: float, comparison: _Comparison, vanished: int) -> None:
    """Raise VanishedInputsError if the inputs of too many rows no longer exist or cannot be read."""
    unread = sum(each.ref.content_hash is None and each.row is not None for each in comparison.pending)
    lost, rows = vanished + unread, comparison.stored.rows
    if lost > max_vanished * rows + 1e-6:
        raise VanishedInputsError(
            f"the inputs of {lost:,} of {counted(rows, 'row')} no longer exist, more than the share of "
            f"{max_vanished:g} that may vanish"
        )


def open_recorded(groups: tuple[SourceGroup, ...] | None, *, clips: bool) -> list[Source]:
    """Open the recorded sources. A source that is equal to another source, or inside another source, is skipped.

    Raises:
        UsageError: the sources are not recorded, or a source cannot be used.
    """
    from pipelines.sources import open_sources, without_nested
    from pipelines.sources.base import STANDARD_INPUT

    if groups is None:
        raise UsageError("the index does not record the sources of all its rows; name all sources", parameter="sources")
    if any(STANDARD_INPUT in group.sources for group in groups):
        raise UsageError(
            "the index was made from a list on standard input, which cannot be read again; name all sources",
            parameter="sources",
        )
    return without_nested(
        [source for group in groups for source in open_sources(group.sources, group.column, clips=clips)]
    )


_DAMAGED = frozenset({"truncated-archive", "damaged-archive"})


def find_failed(index: CommittedIndex) -> SourceChanges:
    """Look up the failed inputs of `index` by name. Nothing is written.

    Raises:
        TransientInputError: an input cannot be read for a temporary reason.
        CorruptIndexError: the rows cannot be read.
    """
    from pipelines.sources import hashed

    names = [column.name for column in index.manifest.columns]
    tables = iter_rows(index, ["row_id", "uri", "uri_raw", "status", "reason", *names])
    failed = [row for table in tables for row in table.to_pylist() if row["status"] == FAILED]
    refs = list(hashed(refs_of_rows(failed, names, clips=holds_clips(index.manifest))))
    held = _hashes_held(index, {ref.content_hash for ref in refs if ref.content_hash is not None})
    # Equal inputs stay separate, so that each of them is listed if they fail again.
    remaining = [ref for ref in refs if ref.content_hash not in held]
    return SourceChanges(
        inputs=len(refs),
        unchanged=0,
        new=NewInputs(remaining, rows_digest(remaining), len(refs) - len(remaining), {}),
        changed=(),
        vanished=0,
        deleted=np.array([row["row_id"] for row in failed], dtype=np.int64),
        reasons=tuple(row["reason"] for row in failed),
    )


def refs_of_rows(rows: list[dict[str, Any]], names: list[str], *, clips: bool) -> Iterator[InputRef]:
    """Yield the inputs under the names of `rows`, with the stored values of the source columns `names`."""
    from pipelines.sources.archives import archive_source
    from pipelines.sources.base import file_input
    from pipelines.sources.folder import FolderSource

    rows_of_archive: dict[tuple[bytes, str | None], list[dict[str, Any]]] = {}
    for row in rows:
        path = row["uri_raw"] or os.fsencode(row["uri"])
        archive = _archive_of(path, row["uri"])
        if archive is not None:
            rows_of_archive.setdefault(archive, []).append(row)
        elif os.path.isdir(path):
            yield from FolderSource(os.fsdecode(path), clips=clips).iter_inputs()
        elif row["reason"] == "bad-list-line" or (row["reason"] == "not-a-local-path" and not is_remote(path)):
            yield InputRef(row["uri"], path, problem=row["reason"], metadata=_metadata(row, names))
        else:
            yield dataclasses.replace(file_input(path, row["uri"]), metadata=_metadata(row, names))
    for (archive_path, column), members in rows_of_archive.items():
        yield from _members(archive_source(os.fsdecode(archive_path), column, clips=clips), members, names)


def _archive_of(path: bytes, uri: str) -> tuple[bytes, str | None] | None:
    """Return (path, column): the archive or Parquet file that contains an input, and the column of a Parquet file.

    Return None if the input is a file of its own.
    """
    from edje_index.images.containers.container import split_uri
    from pipelines.sources.archives import is_archive_name

    if is_archive_name(os.fsdecode(path)):
        return path, None
    parts = split_uri(uri)
    if parts is None or os.path.lexists(path):
        return None
    archive, member = parts
    return os.fsencode(archive), member.rpartition("/")[0] if archive.lower().endswith(".parquet") else None


def _members(archive: Source, rows: list[dict[str, Any]], names: list[str]) -> Iterator[InputRef]:
    """Yield the members of `archive` that are named in `rows`. If the archive was damaged, yield all members."""
    from edje_index.images.containers.container import split_uri

    rows_of_uri = {row["uri"]: row for row in rows}
    was_damaged = any(row["reason"] in _DAMAGED or split_uri(row["uri"]) is None for row in rows)
    for ref in archive.iter_inputs():
        row = rows_of_uri.pop(ref.uri, None)
        if row is not None:
            yield dataclasses.replace(ref, metadata=_metadata(row, names))
        elif was_damaged:
            yield ref
    for uri, row in rows_of_uri.items():
        if split_uri(uri) is not None:
            yield InputRef(uri, archive.path, problem="missing", metadata=_metadata(row, names))


def _metadata(row: dict[str, Any], names: list[str]) -> dict[str, Any] | None:
    return {name: row[name] for name in names if row[name] is not None} or None


def _hashes_held(index: CommittedIndex, hashes: set[str]) -> set[str]:
    """Return the content hashes in `hashes` that belong to a row that has not failed."""
    held: set[str] = set()
    for table in iter_rows(index, ["content_hash", "status"]):
        pairs = zip(table["content_hash"].to_pylist(), table["status"].to_pylist(), strict=True)
        held |= hashes.intersection(digits for digits, status in pairs if status != FAILED)
    return held
