"""A change of an index by a job: a value that says what changes, and the one way to
carry it out.

A command returns an `Edit`. `apply` runs the tasks that no earlier run has finished,
and commits the manifest that follows from the manifest before and the edit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from edje_index.progress import ShardProgress
from pipelines.engines.base import (
    Engine,
    EngineUnavailableError,
    Task,
    TaskFailedError,
    WorkerFactory,
    describe_error,
    run_inline,
)
from pipelines.progress.events import (
    JobStopped,
    OnEvent,
    PlanReady,
    Progress,
    ShardMeter,
    ShouldStop,
    StatusMessage,
)
from pipelines.progress.wording import counted
from storage_formats.change import Change, IndexChange
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.edits import EDIT_SCHEMA, read_edits
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import (
    Ann,
    CommittedIndex,
    Counts,
    Manifest,
    RowMap,
)
from storage_formats.format.receipts import ShardReceipt, fingerprint
from storage_formats.format.row_map import write_row_map
from storage_formats.format.rows import (
    DUPLICATE,
    INDEXED,
    failures_by_reason,
    iter_stored_rows,
)
from storage_formats.format.selection import Selection
from storage_formats.format.source_columns import SourceColumn
from storage_formats.format.tombstones import Tombstones
from storage_formats.writing.copying import count_values, with_values
from storage_formats.writing.publish import (
    add_counts,
    check_receipts,
    receipt_lines,
    total_counts,
    write_tables,
    write_tombstones,
)


@dataclass(frozen=True)
class ShardWork:
    """Tasks that write shards, one task per shard.

    Attributes:
        activity: name of the work in progress events, such as "indexing".
        shards: numbers of the shards, ascending.
        rows: number of rows of all shards.
        identity: JSON object with everything that determines the written bytes.
        make_task: takes a shard number and the fingerprint of the work, and returns the
            task.
        make_worker: function that returns the worker of a process; see
            `pipelines.engines.base`. The worker reports `ShardProgress`.
        close: frees what the tasks share, once they have ended.
        shows_failed: whether the failed rows of the receipts are part of the progress.
    """

    activity: str
    shards: Sequence[int]
    rows: int
    identity: Mapping[str, Any]
    make_task: Callable[[int, str], Task]
    make_worker: WorkerFactory
    engine: Engine = run_inline
    close: Callable[[], None] = lambda: None
    shows_failed: bool = False

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the tasks, which their receipts have."""
        return fingerprint(self.identity)


@dataclass(frozen=True)
class Edit:
    """A change of an index as a value. `apply` carries it out.

    `work` writes the shards that only `spec` has. The rows of shards that `spec` lacks
    are in the index no longer. Everything that is not named stays as it is.

    Attributes:
        spec: shape of the index after the change.
        details: members of `change` in `index.json`, if rows change.
        deleted: ids of the rows to delete. None of them is deleted yet.
        moved: rows that `work` copies to the last segment of `spec`, from shards that
            `spec` lacks; a row map is then written. None moves no row.
        encoded_from: for new precisions, the precisions that they were converted from.
        columns: source columns after the change, without `moved` rows; None keeps them.
        edits: lines to add to the edits of the index, see `Edits`.
        restored: hashes of deleted inputs that need not stay deleted.
        settings: settings after the change; None keeps them.
    """

    spec: IndexSpec
    details: Mapping[str, Any] = field(default_factory=dict)
    work: ShardWork | None = None
    deleted: Sequence[int] = ()
    moved: Selection | None = None
    encoded_from: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: tuple[SourceColumn, ...] | None = None
    edits: pa.Table = field(default_factory=EDIT_SCHEMA.empty_table)
    restored: Collection[str] = ()
    settings: dict[str, Any] | None = None


def apply(
    change: IndexChange, edit: Edit, on_event: OnEvent, should_stop: ShouldStop
) -> Manifest:
    """Carry out `edit`, and commit it. Return the manifest of the index.

    Raises:
        JobStopped: `should_stop()` returned True, or a shard failed. Finished shards
            are kept.
    """
    receipts: list[ShardReceipt] = []
    if edit.work is not None:
        receipts = finish_work(change, edit.work, on_event, should_stop)
    return commit_edit(change, edit, receipts, on_event)


def commit_edit(
    change: IndexChange,
    edit: Edit,
    receipts: Sequence[ShardReceipt],
    on_event: OnEvent,
) -> Manifest:
    """Commit `edit`, whose shards have `receipts`. Return the manifest of the index.

    An edit that changes nothing is not committed.
    """
    before = change.index.manifest
    moves_rows = edit.spec.used_segments != before.spec.used_segments
    edits_rows = len(edit.edits) or edit.restored
    if not moves_rows and not len(edit.deleted) and not edits_rows:
        if edit.spec == before.spec:
            return before
        manifest = edited(change.index, edit, receipts, before.ann)
        change.commit_same_rows(manifest)
        return manifest
    ann = before.ann
    if moves_rows and before.ann_files:
        # a deletion takes a fraction of the time of this import
        from pipelines.jobs.ann import changed_ann

        on_event(StatusMessage("changing the nearest-neighbour index"))
        ann = changed_ann(change.index, edit.spec, on_event)
    return change.commit(edited(change.index, edit, receipts, ann), edit.details)


def next_first_row(manifest: Manifest, shard_size: int) -> int:
    """Return the first row id of new shards with `shard_size` rows. No snapshot has
    used the row id or the number of its shard.
    """
    spec = manifest.spec
    shards = max(spec.shards, manifest.snapshot.next_shard, -(-spec.rows // shard_size))
    return shards * shard_size


def edited(
    index: CommittedIndex,
    edit: Edit,
    receipts: Sequence[ShardReceipt],
    ann: Ann,
) -> Manifest:
    """Return the manifest of `index` after `edit`. It is not written.

    The files that only this manifest names are written: shard tables, tombstones and
    the row map. Their names are those of their contents.

    Args:
        receipts: receipts of the shards that the change wrote.
        ann: description of the nearest-neighbour index after the change.

    Raises:
        CorruptIndexError: a shard has no receipt.
    """
    layout = Layout(index.root)
    before = index.manifest
    spec = edit.spec
    left_out = sorted(before.spec.shards_not_in(spec))
    new = spec.shards_not_in(before.spec)
    written = sorted(new)
    if {*spec.precisions} - {*before.spec.precisions}:
        written = list(spec.shard_numbers())
    check_receipts(receipts, written)
    added = [receipt for receipt in receipts if receipt.shard in new]
    counts = before.counts
    columns = before.columns if edit.columns is None else edit.columns
    if left_out:
        counts, columns = _without_shards(index, left_out, columns, added)
    snapshot = before.snapshot
    if left_out or len(edit.deleted):
        deleted = index.deleted
        stay = ~np.isin(deleted.shards, left_out)
        tombstones = Tombstones(
            spec.shard_size, deleted.shards[stay], deleted.bits[stay]
        )
        if len(edit.deleted):
            tombstones = tombstones.with_rows(list(edit.deleted))
        entry = write_tombstones(layout, tombstones) if len(tombstones) else None
        snapshot = replace(snapshot, deleted=entry, deleted_rows=len(tombstones))
    kept = before.edits
    earlier = read_edits(layout.root, spec, ())
    if left_out or edit.restored:
        kept = ()
        earlier = index.edits
    changed = earlier.changed(edit.edits, edit.restored, left_out)
    edits = changed.write(layout, spec, kept)
    row_maps = before.row_maps
    if edit.moved is not None:
        first_row = next_first_row(before, spec.shard_size)
        parts = ((ids, first_row + ranks) for ids, ranks in edit.moved.by_shard())
        row_map = write_row_map(layout, parts)
        is_partial = len(left_out) < before.spec.used_shards
        row_maps = (*row_maps, RowMap(row_map, first_row, is_partial=is_partial))
    origins = {**before.encoded_from, **edit.encoded_from}
    return replace(
        before,
        spec=spec,
        counts=add_counts(counts, total_counts(added)),
        settings=before.settings if edit.settings is None else edit.settings,
        ann=ann,
        encoded_from={
            name: origins[name] for name in spec.precisions if name in origins
        },
        snapshot=snapshot,
        columns=columns,
        row_maps=row_maps,
        edits=edits,
        **_tables(index, spec, receipts, columns),
    )


def _without_shards(
    index: CommittedIndex,
    shards: Sequence[int],
    columns: Sequence[SourceColumn],
    added: Sequence[ShardReceipt],
) -> tuple[Counts, tuple[SourceColumn, ...]]:
    """Return the counts of `index` without `shards`, and `columns` with the numbers of
    values without `shards` and with those of the `added` shards.
    """
    counts = index.manifest.counts
    statuses = Counter[str]()
    failed = Counter(counts.failed)
    values = Counter({column.name: column.values for column in columns})
    for table in iter_stored_rows(index, ["status", "reason", *values], shards):
        statuses.update(table["status"].to_pylist())
        failed.subtract(failures_by_reason(table))
        values.subtract({name: len(table) - table[name].null_count for name in values})
    added_shards = [receipt.shard for receipt in added]
    values.update(count_values(Layout(index.root), added_shards, columns))
    left = Counts(
        counts.inputs - statuses.total(),
        counts.indexed - statuses[INDEXED],
        counts.duplicates - statuses[DUPLICATE],
        {reason: number for reason, number in failed.items() if number},
    )
    return left, with_values(columns, values)


def _tables(
    index: CommittedIndex,
    spec: IndexSpec,
    receipts: Sequence[ShardReceipt],
    columns: Sequence[SourceColumn],
) -> dict[str, Any]:
    """Write the tables of the segments of `spec` that changed. Return the attributes of
    the manifest with all tables.
    """
    before = index.manifest
    filters = before.filter_tables or (None,) * len(before.shard_tables)
    unchanged_rows = dict(zip(before.spec.used_segments, filters, strict=True))
    unchanged = {}
    if spec.precisions == before.spec.precisions:
        tables = zip(before.spec.used_segments, before.shard_tables, strict=True)
        unchanged = dict(tables)
    lines = receipt_lines(receipts)
    new = spec.shards_not_in(before.spec)
    changed = [each for each in spec.used_segments if each not in unchanged]
    if not all(new.issuperset(spec.segment_shards(segment)) for segment in changed):
        dropped = tuple(
            f"{folder}/{name}/"
            for name in {*before.spec.precisions} - {*spec.precisions}
            for folder in ("tokens", "checksums")
        )
        stored = (
            line for line in index.shard_files() if not line[1].path.startswith(dropped)
        )
        lines = itertools.chain(stored, lines)
    layout = Layout(index.root)
    return write_tables(layout, spec, lines, columns, unchanged, unchanged_rows)


def rows_passing(index: CommittedIndex, where: str | None) -> NDArray[np.int64]:
    """Return the ids of the rows that pass the filter `where`, ascending; none without
    a filter.
    """
    if where is None:
        return np.empty(0, np.int64)
    from edje_index.search.rows import IndexRows

    return np.flatnonzero(IndexRows(index).passing(where))


@contextlib.contextmanager
def resumable(root: str | Path) -> Iterator[None]:
    """Context manager that converts an OSError, such as a full disk, to JobStopped."""
    try:
        yield
    except OSError as error:
        raise JobStopped(
            f"cannot write {root}: {describe_error(error)}; what is finished is kept"
        ) from error


def notifier(on_event: OnEvent) -> Callable[[str], None]:
    """Return a function that passes messages to `on_event`."""
    return lambda text: on_event(StatusMessage(text))


def finish_work(
    change: Change, work: ShardWork, on_event: OnEvent, should_stop: ShouldStop
) -> list[ShardReceipt]:
    """Run the tasks of `work` that earlier runs of `change` did not finish. Return the
    receipts of all shards, in their order.
    """
    earlier = change.receipts(work.shards, work.fingerprint)
    on_event(PlanReady(work.rows, len(work.shards), len(earlier)))
    receipts = list(run_shards(work, earlier, on_event, should_stop))
    return sorted(receipts, key=lambda receipt: receipt.shard)


def run_shards(
    work: ShardWork,
    earlier: Mapping[int, ShardReceipt],
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> Generator[ShardReceipt, None, None]:
    """Run the tasks of the shards that have no receipt in `earlier`. Yield the receipts
    of all shards, first those in `earlier`.

    Raises:
        JobStopped: `should_stop()` returned True, a shard failed, or the engine failed.
            Finished shards are kept.
        UsageError, EngineUnavailableError: the engine cannot run as requested.
    """
    shards = work.shards
    plan = work.fingerprint
    meter = ShardMeter(work.activity, work.rows, len(shards))
    finished = finished_rows = 0

    def finish(receipt: ShardReceipt, seconds: Mapping[str, float]) -> Progress:
        nonlocal finished, finished_rows
        finished = finished + 1
        finished_rows = finished_rows + receipt.rows
        failed = sum(receipt.failed.values()) if work.shows_failed else 0
        return meter.update(
            ShardProgress(receipt.shard, receipt.rows, failed, seconds), is_final=True
        )

    try:
        for receipt in earlier.values():
            # times of earlier runs do not count
            finish(receipt, {})
            yield receipt
        missing = [shard for shard in shards if shard not in earlier]
        receipts = work.engine(
            work.make_worker,
            (work.make_task(shard, plan) for shard in missing),
            on_progress=lambda report: on_event(meter.update(report)),
            on_event=on_event,
            should_stop=should_stop,
        )
        with contextlib.closing(receipts):
            for receipt in receipts if missing else ():
                on_event(finish(receipt, receipt.seconds))
                yield receipt
        # what follows may take long
        if finished < len(shards) or should_stop():
            raise JobStopped("stopped")
    except (UsageError, EngineUnavailableError):
        raise
    except (EdjeError, OSError) as error:
        # a second run may succeed
        of_shard = (
            f"shard {error.task.shard}: " if isinstance(error, TaskFailedError) else ""
        )
        raise JobStopped(
            f"{of_shard}{describe_error(error)}; {finished_rows:,} of"
            f" {counted(work.rows, 'row')} are kept, {finished:,} of"
            f" {counted(len(shards), 'shard')} are finished"
        ) from error
    finally:
        work.close()
