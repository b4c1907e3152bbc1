"""Functions that append, update and retry-failed share: encode new rows and commit a snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.engines.base import describe_error
from pipelines.jobs.encode_shards import encode_shards
from pipelines.jobs.failed_inputs import FailedInputsError
from pipelines.jobs.leftovers import discard_stopped_copy, remove_leftovers
from pipelines.jobs.lock import locked_index
from pipelines.planning.new_rows import PreparedRows, discard_rows, is_committed
from pipelines.planning.plan import BuildPlan, read_plan
from pipelines.progress.events import JobStopped, OnEvent, ShouldStop, StatusMessage
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex, Manifest
    from storage_formats.format.receipts import ShardReceipt


@dataclass(frozen=True)
class RowChange:
    """The part of a change that is committed in addition to new rows.

    Attributes:
        kind: name of the change in the output of `history`.
        deleted: ids of the rows to delete, int64 [n], ascending.
        record: function that takes the new manifest and returns it with additional data, for example the sources.
    """

    kind: str
    deleted: NDArray[np.int64]
    record: Callable[[Manifest], Manifest]


@contextlib.contextmanager
def changing(root: Path, on_event: OnEvent) -> Iterator[CommittedIndex]:
    """Lock and open the index at `root`. Remove files of finished changes and of stopped compactions.

    Raises:
        UsageError: there is no index at `root`.
        EdjeError: another process is changing the index.
    """
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.publish import remove_build

    CommittedIndex.open(root)  # fails before the lock makes a directory
    remove_leftovers(root)
    with locked_index(root):
        index = CommittedIndex.open(root)
        plan = read_plan(root, append=True)
        if plan is not None and is_committed(plan, index):
            remove_build(Layout(root))
        elif plan is None and Layout(root).compaction.exists():
            discard_stopped_copy(index, on_event)
        yield index


def encode_rows(
    prepared: PreparedRows, index: CommittedIndex, on_event: OnEvent, should_stop: ShouldStop
) -> list[ShardReceipt]:
    """Encode the rows of `prepared` and return the receipts of their shards. The list is empty if there are no rows.

    Raises:
        JobStopped: the job stopped early. Finished shards are kept.
        FailedInputsError: no input could be indexed, or more inputs failed than allowed. The index is unchanged.
    """
    if prepared.build is None or prepared.config is None:
        return []
    with _stopping_on_full_disk(index.root):
        try:
            return encode_shards(prepared.config, prepared.build, on_event, should_stop).receipts
        except FailedInputsError as error:
            if not error.over_limit:
                discard_rows(index)
            raise


def commit_rows(
    prepared: PreparedRows, index: CommittedIndex, receipts: list[ShardReceipt], change: RowChange, on_event: OnEvent
) -> Manifest:
    """Commit one snapshot with the new rows and without the deleted rows. Return the manifest of the snapshot.

    If there are no rows to add or delete, nothing is committed, and the current manifest is returned.
    """
    from storage_formats.writing.publish import remove_build
    from storage_formats.writing.snapshots import commit_snapshot, with_deleted_rows

    if prepared.build is None and not len(change.deleted):
        return index.manifest
    with _stopping_on_full_disk(index.root):
        changed: Manifest = index.manifest
        details: dict[str, Any] = {}
        if prepared.build is not None and prepared.config is not None:
            plan, memory = prepared.build.plan, prepared.config.memory
            changed, details = _with_segment(plan, index, receipts, on_event, memory=memory)
        if len(change.deleted):
            changed, details = (
                with_deleted_rows(index, changed, change.deleted),
                {**details, "deleted": len(change.deleted)},
            )
        manifest = commit_snapshot(index, change.record(changed), {"kind": change.kind, **details})
    remove_build(Layout(index.root))
    return manifest


def _with_segment(
    plan: BuildPlan, index: CommittedIndex, receipts: list[ShardReceipt], on_event: OnEvent, *, memory: int | None
) -> tuple[Manifest, dict[str, Any]]:
    """Add the new rows to the nearest-neighbour index and to the manifest. Return (manifest, details for `history`)."""
    from edje_index.indexing.faiss_index import extend_ann
    from storage_formats.format.shard_table import write_shard_table
    from storage_formats.writing.publish import add_counts, check_receipts, total_counts

    check_receipts(receipts, plan.shards)
    on_event(StatusMessage("extending the nearest-neighbour index"))
    layout, manifest = Layout(index.root), index.manifest
    files = [(receipt.shard, file) for receipt in receipts for file in receipt.files]
    changed = replace(
        manifest,
        spec=plan.spec,
        counts=add_counts(manifest.counts, total_counts(receipts)),
        ann=extend_ann(layout, plan.spec, manifest.ann, memory=memory),
        further_tables=(*manifest.further_tables, write_shard_table(layout, files)),
        columns=plan.columns,
    )
    return changed, {"first_row": plan.spec.used_segments[-1].first_row, "rows": plan.rows}


@contextlib.contextmanager
def _stopping_on_full_disk(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobStopped(f"cannot write {root}: {describe_error(error)}; finished shards are kept") from error
