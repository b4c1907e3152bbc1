"""Changes of indexes by jobs: values that describe a change, and `apply`, which carries
the change out.

A job describes the change of an index, or a new index, as an `Edit`. `apply` runs the
tasks that no earlier run has finished, and commits the new manifest.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from edje_index.indexing.kept_batches import kept_rows
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
    ignore,
    progress_callback,
    stop_at_events,
)
from pipelines.progress.wording import counted
from storage_formats.arrays import Ints
from storage_formats.atomic import Json, make_directories
from storage_formats.change import (
    Change,
    begin_change,
    now,
)
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.file_check import check_file, refuse
from storage_formats.format.layout import EMBEDDING_FILE, IndexSpec
from storage_formats.format.manifest import (
    Ann,
    CommittedIndex,
    Counts,
    Manifest,
    Snapshot,
    created_by,
)
from storage_formats.format.offset import Offset, write_offset
from storage_formats.format.places import Place
from storage_formats.format.receipts import ShardReceipt, fetch_written_embeddings
from storage_formats.format.rows import VALUE_SCHEMA
from storage_formats.format.source_columns import SourceColumn
from storage_formats.remote.urls import IndexLocation
from storage_formats.writing.publish import (
    add_counts,
    total_counts,
    with_tombstones,
    write_removed,
    write_tables,
)

if TYPE_CHECKING:
    from edje_index.indexing.faiss_build import AnnRequest

PROCESSORS_MEMBER = "encoded_on"
"""Key in the settings of an index. The value is the sorted list of the processors that
encoded the rows, as named by `ShardReceipt.encoded_on`.
"""


_NO_CHANGE = Counts(0, 0, 0)


class FailedInputsError(EdjeError):
    """More inputs failed than the caller allows, or no input could be indexed. Finished
    shards are kept, unless `Change.abandon` was called.
    """


@dataclass(frozen=True)
class ShardWork:
    """Tasks that write shards, one task per shard.

    Attributes:
        activity: name of the work in progress events, such as "indexing".
        shards: numbers of the shards, ascending.
        rows: total number of rows in these shards.
        fingerprint: `fingerprint` of everything that determines the written bytes,
            which every receipt of these tasks contains.
        make_task: function that takes a shard number, and returns the task of the
            shard.
        make_worker: function that is called in each worker process and returns the
            worker; see `pipelines.engines.base`. The worker reports `ShardProgress`.
        engine: engine that runs the tasks.
        shows_failed: True to report the number of failed rows in progress events.
        described: further attributes of the event `PlanReady`, by name.
        check: function that is called after each finished shard with all receipts so
            far. It raises FailedInputsError to end the work.
    """

    activity: str
    shards: Sequence[int]
    rows: int
    fingerprint: str
    make_task: Callable[[int], Task]
    make_worker: WorkerFactory
    engine: Engine = run_inline
    shows_failed: bool = False
    described: Json = field(default_factory=dict)
    check: Callable[[Sequence[ShardReceipt]], None] = lambda receipts: None


@dataclass(frozen=True)
class Edit:
    """A description of a change of an index, or of a new index. `apply` carries the
    change out.

    `spec` may have new shards, or new precisions of all shards: `work` writes them. An
    attribute with its default value changes nothing. A new index needs `work`, `model`,
    `settings` and `columns`.

    Attributes:
        spec: shape of the index after the change.
        details: members of `change` in `index.json`; empty for a build. They are used
            only if the change makes a new snapshot or a new index.
        work: tasks that write the new shards or the new precisions.
        deleted: ids of the rows to delete. The rows must not be deleted already.
        erases: True if `work` writes shards of the index again, to `build/erased/`,
            without the data of deleted rows. The commit moves them into place. All
            other files with data of deleted rows are written again, too, and all
            earlier snapshots are removed.
        counts: numbers to add to the counts of the index, apart from those of new
            shards.
        encoded_from: for each new precision, the chain of precisions that its tokens
            were converted from.
        columns: source columns after the change; None keeps the columns.
        values: new values of rows, see `with_values`.
        removed: the `input_hash` of each input that no update may add, after the
            change. None keeps those of the index.
        settings: settings after the change; None keeps the settings.
        model: description of the model bundle after the change, see `model_record`;
            None keeps it.
        offset: offset block to write, if a precision is stored with an offset.
        ann: request for a nearest-neighbour index, which replaces the present one.
        needs_indexed: True to commit nothing if `work` indexes no row.
    """

    spec: IndexSpec
    details: Json = field(default_factory=dict)
    work: ShardWork | None = None
    deleted: Sequence[int] = ()
    erases: bool = False
    counts: Counts = _NO_CHANGE
    encoded_from: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: tuple[SourceColumn, ...] | None = None
    values: pa.Table = field(default_factory=VALUE_SCHEMA.empty_table)
    removed: Collection[bytes] | None = None
    settings: Json | None = None
    model: Json | None = None
    offset: Offset | None = None
    ann: AnnRequest | None = None
    needs_indexed: bool = False

    def commit(
        self,
        change: Change,
        receipts: Sequence[ShardReceipt],
        on_event: OnEvent,
    ) -> Manifest:
        """Commit the change, and return the manifest of the index.

        If the edit changes nothing, nothing is committed.

        Args:
            receipts: receipts of the shards that `work` wrote.
        """
        layout = change.layout
        index = change.before
        spec = self.spec
        added = receipts
        if index is None:
            # A new index begins as an index without rows.
            before = Manifest(
                spec,
                _NO_CHANGE,
                model={},
                settings={},
                plan=self.work.fingerprint if self.work else "",
                shard_tables=(),
                rows_files=(),
                ann={"kind": "none"},
                created_by=created_by(),
            )
            if self.details:
                details = {**self.details, "created": now()}
                new = Snapshot(change=details, next_shard=spec.shards)
                before = replace(before, snapshot=new)
        else:
            before = index.manifest
            added = [each for each in receipts if each.shard >= before.spec.shards]
        if self.needs_indexed and not total_counts(receipts).indexed:
            change.abandon()
            return before
        columns = before.columns if self.columns is None else self.columns
        # receipts of an earlier version have no values
        if index is None and all(each.values for each in receipts):
            values = sum((Counter(each.values) for each in receipts), Counter[str]())
            columns = tuple(
                replace(column, values=values[column.name]) for column in columns
            )
        ann = before.ann
        snapshot = before.snapshot
        changes_segments = spec.used_segments != before.spec.used_segments
        if changes_segments:
            ann = before.ann_after_append()
        # The name of each file that is written here contains a hash of its content, so
        # no file of an earlier snapshot is overwritten.
        if index is not None:
            deleted = index.deleted.with_rows(list(self.deleted))
            if len(self.deleted):
                snapshot = with_tombstones(layout, spec, snapshot, deleted)
            if self.erases and before.ann_files:
                # Import the module only here: the import takes several times as long as
                # a deletion, and a deletion does not need the module.
                from edje_index.indexing.faiss_build import ann_without_rows

                on_event(StatusMessage("changing the nearest-neighbour index"))
                ann = ann_without_rows(layout, index, deleted.row_ids.tolist())
        if self.ann is not None:
            if index is None:
                fetch_written_embeddings(layout, receipts)
            else:
                fetch_embeddings(index)
            ann = new_ann(layout, spec, self.ann, on_event)
        removed = before.removed
        if self.removed is not None:
            removed = write_removed(layout, self.removed)
        settings = self.settings or before.settings
        processors = {each.encoded_on for each in receipts if each.encoded_on}
        processors.update(settings.get(PROCESSORS_MEMBER, ()))
        if processors:
            settings = {**settings, PROCESSORS_MEMBER: sorted(processors)}
        origins = {**before.encoded_from, **self.encoded_from}
        counts = add_counts(before.counts, self.counts)
        manifest = replace(
            before,
            spec=spec,
            counts=add_counts(counts, total_counts(added)),
            settings=settings,
            model=self.model or before.model,
            ann=ann,
            encoded_from={
                name: origins[name] for name in spec.precisions if name in origins
            },
            snapshot=snapshot,
            columns=columns,
            removed=removed,
            **write_tables(layout, spec, receipts, columns, index, self.values),
        )
        changes_rows = len(self.values) or len(self.deleted)
        changes_removed = removed != before.removed
        if index is not None and (
            changes_segments or changes_rows or changes_removed or self.erases
        ):
            manifest = change.new_snapshot(manifest, self.details, is_only=self.erases)
        if manifest != before:
            change.commit(manifest)
        return manifest


@dataclass(frozen=True)
class Applied:
    """What `apply` did.

    Attributes:
        manifest: manifest of the index after the change.
        receipts: receipts of the written shards, ordered by shard number.
        earlier: numbers of the shards that earlier runs had finished.
        speed: number of rows that this run wrote per second.
    """

    manifest: Manifest
    receipts: Sequence[ShardReceipt] = ()
    earlier: Collection[int] = ()
    speed: float = 0.0


@contextlib.contextmanager
def begin(
    root: IndexLocation,
    kind: str,
    request: Json | None = None,
    *,
    on_event: OnEvent = ignore,
    is_new: bool = False,
    dry_run: bool = False,
) -> Iterator[Change]:
    """Begin a change, see `begin_change`. An OSError inside the context becomes
    JobStopped.
    """
    notify = notifier(on_event)
    begun = begin_change(
        root, kind, request, is_new=is_new, notify=notify, dry_run=dry_run
    )
    with begun as change, resumable(root):
        yield change


@contextlib.contextmanager
def resumable(root: IndexLocation) -> Iterator[None]:
    """Context manager that converts an OSError, for example from a full disk, to
    JobStopped.
    """
    try:
        yield
    except OSError as error:
        raise JobStopped(
            f"cannot write {root}: {describe_error(error)}; what is finished is kept"
        ) from error


def apply(
    change: Change,
    edit: Edit,
    on_event: OnEvent,
    should_stop: ShouldStop,
) -> Applied:
    """Carry out a change: run the tasks that no earlier run has finished, and commit
    the change. A dry run does nothing.

    Args:
        edit: description of the change.

    Raises:
        JobStopped: `should_stop()` returned True, or a shard failed. Finished shards
            are kept.
        FailedInputsError: `work.check` found that too many inputs failed.
        UsageError, EngineUnavailableError: the engine cannot run as requested.
    """
    if change.before is not None and change.is_dry:
        return Applied(change.index.manifest)
    layout = change.layout
    if edit.erases:
        # The directory must be on the device before the commit names its files.
        make_directories(layout.erased)
    if edit.offset is not None and edit.spec.offset is not None:
        write_offset(layout, edit.offset)
    work = edit.work
    # The nearest-neighbour index is built before the commit, which may take long.
    stopped = "stopped before the commit"
    report = stop_at_events(on_event, should_stop, stopped)
    if work is None:
        if should_stop():
            raise JobStopped(stopped)
        return Applied(edit.commit(change, (), report))
    started = time.monotonic()
    shards = work.shards
    earlier = change.receipts(shards, work.fingerprint)
    on_event(PlanReady(work.rows, len(shards), len(earlier), **work.described))
    meter = ShardMeter(work.activity, work.rows, len(shards))
    receipts: list[ShardReceipt] = []

    def finish(receipt: ShardReceipt, seconds: Mapping[str, float]) -> Progress:
        receipts.append(receipt)
        failed = sum(receipt.failed.values()) if work.shows_failed else 0
        return meter.update(
            ShardProgress(receipt.shard, receipt.rows, failed, seconds), is_final=True
        )

    try:
        for receipt in earlier.values():
            # Pass no stage times, because events report the times of this run only.
            finish(receipt, {})
            work.check(receipts)
        missing = [shard for shard in shards if shard not in earlier]
        if missing:
            finished = work.engine(
                work.make_worker,
                map(work.make_task, missing),
                on_progress=lambda report: on_event(meter.update(report)),
                on_event=on_event,
                should_stop=should_stop,
            )
            with contextlib.closing(finished):
                for receipt in finished:
                    on_event(finish(receipt, receipt.seconds))
                    work.check(receipts)
        # Also stop if all shards are finished but a stop was requested: the commit may
        # take long. The handler below adds the counts of rows and shards to the text.
        if len(receipts) < len(shards) or should_stop():
            raise JobStopped("stopped")
    except (UsageError, EngineUnavailableError, FailedInputsError):
        raise
    except (EdjeError, OSError) as error:
        # The error may be temporary. JobStopped says that the job can be resumed.
        of_shard = (
            f"shard {error.task.shard}: " if isinstance(error, TaskFailedError) else ""
        )
        rows = sum(receipt.rows for receipt in receipts)
        with contextlib.suppress(OSError, EdjeError):
            rows += kept_rows(layout)
        raise JobStopped(
            f"{of_shard}{describe_error(error)}; {rows:,} of"
            f" {counted(work.rows, 'row')} are kept, {len(receipts):,} of"
            f" {counted(len(shards), 'shard')} are finished"
        ) from error
    receipts.sort(key=lambda receipt: receipt.shard)
    rows = sum(receipt.rows for receipt in receipts if receipt.shard not in earlier)
    speed = rows / (time.monotonic() - started)
    return Applied(edit.commit(change, receipts, report), receipts, earlier, speed)


def fetch_embeddings(index: CommittedIndex) -> None:
    """Make the embeddings of `index` readable on this machine, and compare them with
    their checksums, because a FAISS file of damaged embeddings would look undamaged.

    Raises:
        CorruptIndexError: a file is damaged.
    """
    numbers = list(index.spec.shard_numbers())
    files = CommittedFiles(index, EMBEDDING_FILE).files(numbers).values()
    index.fetch(files)
    for file in files:
        refuse(file.path, check_file(index.root, file))


def new_ann(
    place: Place, spec: IndexSpec, request: AnnRequest, on_event: OnEvent
) -> Ann:
    """Build a nearest-neighbour index, see `build_ann`. Return its description for the
    manifest.
    """
    from edje_index.indexing.faiss_build import build_ann

    on_event(StatusMessage("building the nearest-neighbour index"))
    report = progress_callback(on_event)
    return build_ann(place, spec, request=request, on_progress=report)


def rows_passing(index: CommittedIndex, where: str | None) -> Ints:
    """Return the ids of the rows that pass the filter `where`, int64 [k], ascending. If
    `where` is None, no row passes.
    """
    if where is None:
        return np.empty(0, np.int64)
    from edje_index.search.rows import IndexRows

    return np.flatnonzero(IndexRows(index).passing(where))


def notifier(on_event: OnEvent) -> Callable[[str], None]:
    """Return a function that passes a text to `on_event` as a `StatusMessage`."""
    return lambda text: on_event(StatusMessage(text))
