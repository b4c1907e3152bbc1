"""The update job: adds, replaces and deletes rows so that an index matches its sources, in one snapshot."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.jobs.new_rows import RowChange, changing, commit_rows, encode_rows
from pipelines.planning.config import UpdateConfig
from pipelines.planning.new_rows import PreparedRows, resume_or_plan, settings_of_rows
from pipelines.planning.recorded_sources import SourceGroup, recorded_sources, with_sources
from pipelines.planning.update import SourceChanges, compare_sources
from pipelines.progress.events import OnEvent, ShouldStop

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex, Manifest
    from storage_formats.format.receipts import ShardReceipt


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update.

    Attributes:
        inputs: number of all inputs of the sources; the sum of unchanged, new, changed, duplicates and failed.
        unchanged: number of inputs whose row did not change. This includes failed inputs that have not changed.
        new: number of inputs with a new name that were encoded.
        changed: number of inputs with new content that were encoded. The old rows of these inputs are deleted.
        duplicates: number of inputs that got no new row, because another row has the same content.
        failed: number of new and changed inputs that could not be encoded; they have rows without tokens.
        failed_by_reason: number of failed inputs by reason.
        vanished: number of rows whose input no longer exists. These rows are deleted.
        deleted: number of deleted rows: vanished rows, and old rows of changed inputs.
        first_row: row id of the first new row; None if there is no new row.
        rows: number of new rows.
        shards: number of new shards.
        snapshot: number of the current snapshot.
        seconds: wall time of this run.
        dry_run: True if the update was only tried and nothing was changed. `failed` then counts only inputs that cannot
            be read; other inputs may fail when they are decoded.
        encode_seconds: estimated seconds that one worker needs to encode the new rows; None unless `dry_run` is True.

    Example:
        >>> from pathlib import Path
        >>> from pipelines import update_index
        >>> Path("photos/0.jpg").unlink()
        >>> result = update_index("photos.edje", engine="inline")
        >>> result.inputs, result.unchanged, result.vanished, result.snapshot
        (5, 5, 1, 1)
    """

    inputs: int
    unchanged: int
    new: int
    changed: int
    duplicates: int
    failed: int
    failed_by_reason: dict[str, int]
    vanished: int
    deleted: int
    first_row: int | None
    rows: int
    shards: int
    snapshot: int
    seconds: float
    dry_run: bool = False
    encode_seconds: float | None = None


def run_update(config: UpdateConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> UpdateResult:
    """Add, replace and delete rows so that the index matches its sources. With `config.dry_run`, nothing is written.

    The sources are `config.sources`; if empty, the sources recorded in the index. A stopped update keeps its finished
    shards. The next update reuses these shards if the same inputs must be encoded.

    Raises:
        UsageError: a setting or a source of `config` is invalid, or the index does not record its sources.
        ModelError: the model bundle cannot be used, or another bundle built the index.
        JobStopped: the update stopped early. Finished shards are kept.
        FailedInputsError: more inputs failed than allowed. The index is unchanged.
        TransientInputError: an input cannot be read for a temporary reason.
        EdjeError: a source cannot be read, the inputs of too many rows no longer exist, another process is changing the
            index, or another change has not finished.
    """
    started = time.monotonic()
    if config.dry_run:
        return _trial(config, on_event, should_stop, started)
    with changing(config.root, on_event) as index:
        changes = compare_sources(config, index, on_event, should_stop)
        prepared = resume_or_plan(config, index, "update", changes.new)
        receipts = encode_rows(prepared, index, on_event, should_stop)
        change = RowChange("update", changes.deleted, lambda manifest: _with_sources(config, index, manifest))
        manifest = commit_rows(prepared, index, receipts, change, on_event)
    return _result(changes, prepared, receipts, manifest, started=started)


def _with_sources(config: UpdateConfig, index: CommittedIndex, manifest: Manifest) -> Manifest:
    if config.sources:
        return with_sources(manifest, (SourceGroup(settings_of_rows(config, index).sources, config.column),))
    return with_sources(manifest, recorded_sources(index.manifest) or ())


def _trial(config: UpdateConfig, on_event: OnEvent, should_stop: ShouldStop, started: float) -> UpdateResult:
    """Return the result of a dry run. The index is not locked, because nothing is written."""
    from storage_formats.format.manifest import CommittedIndex

    index = CommittedIndex.open(config.root)
    changes = compare_sources(config, index, on_event, should_stop)
    refs = changes.new.refs
    failed = Counter(ref.problem for ref in refs if ref.problem is not None)
    changed = sum(refs[position].problem is None for position in changes.changed)
    rows = len(refs)
    return UpdateResult(
        inputs=changes.inputs,
        unchanged=changes.unchanged,
        new=rows - failed.total() - changed,
        changed=changed,
        duplicates=changes.new.duplicates,
        failed=failed.total(),
        failed_by_reason=dict(sorted(failed.items())),
        vanished=changes.vanished,
        deleted=len(changes.deleted),
        first_row=None,
        rows=rows,
        shards=-(-rows // index.manifest.spec.shard_size),
        snapshot=index.manifest.snapshot.number,
        seconds=time.monotonic() - started,
        dry_run=True,
        encode_seconds=changes.encode_seconds and (rows - failed.total()) * changes.encode_seconds,
    )


def _result(
    changes: SourceChanges,
    prepared: PreparedRows,
    receipts: list[ShardReceipt],
    manifest: Manifest,
    *,
    started: float,
) -> UpdateResult:
    from storage_formats.writing.publish import total_counts

    counts = total_counts(receipts)
    changed = _indexed_among(prepared, changes.changed)
    plan = None if prepared.build is None else prepared.build.plan
    return UpdateResult(
        inputs=changes.inputs,
        unchanged=changes.unchanged,
        new=counts.indexed - changed,
        changed=changed,
        duplicates=changes.new.duplicates,
        failed=counts.failed_total,
        failed_by_reason=counts.failed,
        vanished=changes.vanished,
        deleted=len(changes.deleted),
        first_row=None if plan is None else plan.spec.used_segments[-1].first_row,
        rows=counts.inputs,
        shards=len(receipts),
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
    )


def _indexed_among(prepared: PreparedRows, positions: tuple[int, ...]) -> int:
    """Return how many of the new rows at `positions` were encoded."""
    from storage_formats.format.rows import INDEXED, read_rows

    if prepared.build is None or not positions:
        return 0
    plan = prepared.build.plan
    first_row = plan.spec.used_segments[-1].first_row
    rows = read_rows(plan.root, [first_row + position for position in positions], ["status"])
    return int(rows["status"].to_pylist().count(INDEXED))
