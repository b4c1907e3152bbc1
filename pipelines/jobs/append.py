"""The append job: encodes new inputs as further shards of an index, and commits a snapshot."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipelines.engines.base import describe_error
from pipelines.jobs.encode_shards import encode_shards
from pipelines.jobs.failed_inputs import FailedInputsError
from pipelines.jobs.leftovers import remove_leftovers
from pipelines.jobs.lock import locked_index
from pipelines.planning.append import PreparedAppend, is_committed, prepare_append
from pipelines.planning.config import AppendConfig
from pipelines.planning.plan import BuildPlan, read_plan
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import JobStopped, ShouldStop
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex, Manifest
    from storage_formats.format.receipts import ShardReceipt


@dataclass(frozen=True)
class AppendResult:
    """The result of an append.

    Attributes:
        inputs: all inputs of the sources; the sum of indexed, duplicates and failed.
        indexed: inputs that were encoded.
        duplicates: inputs without a row of their own, because the index or an earlier input has the same content.
        failed: inputs that could not be encoded; they have rows without tokens.
        failed_by_reason: number of failed inputs by reason.
        first_row: row id of the first new row; None if there is no new row.
        rows: number of new rows.
        shards: number of new shards.
        snapshot: number of the current snapshot.
        seconds: wall time of this run.

    Example:
        >>> from pipelines import append_index
        >>> result = append_index("photos.edje", "photos", engine="inline")
        >>> result.inputs, result.duplicates, result.rows, result.snapshot
        (6, 6, 0, 0)
    """

    inputs: int
    indexed: int
    duplicates: int
    failed: int
    failed_by_reason: dict[str, int]
    first_row: int | None
    rows: int
    shards: int
    snapshot: int
    seconds: float


def run_append(config: AppendConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> AppendResult:
    """Append the inputs of `config.sources` that the index does not hold. Resumes a stopped append.

    Raises:
        UsageError: a setting of `config` is invalid, or the index was not made by a build.
        ModelError: the model bundle cannot be used, or another bundle built the index.
        JobStopped: the append ended early; the same call resumes the append.
        FailedInputsError: no new input could be indexed, or more inputs failed than allowed. The index is unchanged.
        EdjeError: another process is changing the index, or another append or conversion has not finished.
    """
    from storage_formats.format.manifest import CommittedIndex

    started = time.monotonic()
    CommittedIndex.open(config.root)  # fails before the lock makes a directory
    remove_leftovers(config.root)
    with locked_index(config.root):
        index = CommittedIndex.open(config.root)
        _remove_committed(config, index)
        prepared = prepare_append(config, index, on_event, should_stop)
        receipts: list[ShardReceipt] = []
        manifest = index.manifest
        if prepared.build is not None:
            try:
                receipts = encode_shards(prepared.config, prepared.build, on_event, should_stop).receipts
                manifest = _publish(prepared, prepared.build.plan, index, receipts, on_event)
            except FailedInputsError as error:
                if not error.over_limit:
                    _discard(index)
                raise
            except OSError as error:
                reason = f"cannot write {config.root}: {describe_error(error)}; finished shards are kept"
                raise JobStopped(reason) from error
        _remove_build(config)
    return _result(prepared, receipts, manifest, time.monotonic() - started)


def _remove_committed(config: AppendConfig, index: CommittedIndex) -> None:
    """Remove `build/` if it holds the plan of an append that is already committed."""
    plan = read_plan(config.root, append=True)
    if plan is not None and is_committed(plan, index):
        _remove_build(config)


def _remove_build(config: AppendConfig) -> None:
    from storage_formats.writing.publish import remove_build

    remove_build(Layout(config.root))


def _publish(
    prepared: PreparedAppend, plan: BuildPlan, index: CommittedIndex, receipts: list[ShardReceipt], on_event: OnEvent
) -> Manifest:
    """Extend the nearest-neighbour index, and commit the snapshot."""
    from edje_index.indexing.faiss_index import extend_ann
    from storage_formats.format.shard_table import write_shard_table
    from storage_formats.writing.publish import add_counts, check_receipts, total_counts
    from storage_formats.writing.snapshots import commit_snapshot

    check_receipts(receipts, plan.shards)
    on_event(StatusMessage("extending the nearest-neighbour index"))
    layout, manifest = Layout(index.root), index.manifest
    files = [(receipt.shard, file) for receipt in receipts for file in receipt.files]
    changed = replace(
        manifest,
        spec=plan.spec,
        counts=add_counts(manifest.counts, total_counts(receipts)),
        ann=extend_ann(layout, plan.spec, manifest.ann),
        further_tables=(*manifest.further_tables, write_shard_table(layout, files)),
        columns=plan.columns,
    )
    change = {"kind": "append", "first_row": plan.spec.used_segments[-1].first_row, "rows": plan.rows}
    return commit_snapshot(index, changed, change)


def _discard(index: CommittedIndex) -> None:
    """Remove the plan and the files of an unfinished append. The committed snapshots stay."""
    from storage_formats.writing.publish import remove_build
    from storage_formats.writing.snapshots import kept_snapshots, remove_unnamed_files

    layout = Layout(index.root)
    remove_build(layout)
    remove_unnamed_files(layout, kept_snapshots(index))


def _result(prepared: PreparedAppend, receipts: list[ShardReceipt], manifest: Manifest, seconds: float) -> AppendResult:
    from storage_formats.writing.publish import total_counts

    counts = total_counts(receipts)
    plan = prepared.build.plan if prepared.build is not None else None
    return AppendResult(
        inputs=counts.inputs + prepared.duplicates,
        indexed=counts.indexed,
        duplicates=prepared.duplicates,
        failed=counts.failed_total,
        failed_by_reason=counts.failed,
        first_row=None if plan is None else plan.spec.used_segments[-1].first_row,
        rows=counts.inputs,
        shards=len(receipts),
        snapshot=manifest.snapshot.number,
        seconds=seconds,
    )
