"""Prepares an update: compares the sources with the rows of an index, and fails if a source seems to be lost."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.images.inputs import InputRef, display_path, rows_digest
from edje_index.images.remote.urls import is_remote
from pipelines.planning.config import UpdateConfig
from pipelines.planning.new_rows import NewInputs
from pipelines.planning.recorded_sources import holds_clips, open_recorded, recorded_sources
from pipelines.planning.stored_rows import StoredRow, StoredRows
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage
from pipelines.progress.wording import counted
from storage_formats.errors import EdjeError

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex

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
        encode_seconds: mean seconds that the model took per encoded row of the index; None if no row has tokens.
    """

    inputs: int
    unchanged: int
    new: NewInputs
    changed: tuple[int, ...]
    vanished: int
    deleted: NDArray[np.int64]
    encode_seconds: float | None


def compare_sources(
    config: UpdateConfig, index: CommittedIndex, on_event: OnEvent, should_stop: ShouldStop
) -> SourceChanges:
    """List the sources and compare every input with the rows of `index`. Nothing is written.

    An input is compared with the row of the same name. The row is unchanged if the content is the same too.

    Raises:
        UsageError: a source cannot be used, or the index does not record its sources and `config.sources` is empty.
        EdjeError: a source or a part of a source cannot be read, or the share of rows whose input no longer exists is
            larger than `config.max_vanished`.
        TransientInputError: an input cannot be read for a temporary reason.
        JobStopped: `should_stop()` returned True.
    """
    from pipelines.sources import count_ignored, digested, hashed, iter_all, open_sources

    clips = holds_clips(index.manifest)
    if config.sources:
        sources = open_sources(config.sources, config.column, clips=clips)
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
    _refuse_hidden_rows(index, comparison, [] if config.max_vanished >= 1 else empty)
    _refuse_many_vanished(config.max_vanished, comparison, changes.vanished)
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
            encode_seconds=self.stored.encode_seconds,
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
    from storage_formats.format.rows import iter_rows

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
