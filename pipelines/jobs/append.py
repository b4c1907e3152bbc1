"""The append job: encodes new inputs into new shards of an index, and commits a snapshot."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelines.jobs.new_rows import RowChange, changing, commit_rows, encode_rows
from pipelines.planning.append import prepare_append
from pipelines.planning.config import AppendConfig
from pipelines.planning.new_rows import PreparedRows, settings_of_rows
from pipelines.planning.recorded_sources import SourceGroup, with_further_source
from pipelines.progress.events import OnEvent, ShouldStop

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.receipts import ShardReceipt


@dataclass(frozen=True)
class AppendResult:
    """The result of an append.

    Attributes:
        inputs: number of all inputs of the sources; the sum of indexed, duplicates and failed.
        indexed: number of inputs that were encoded.
        duplicates: number of inputs that were skipped, because the index or an earlier input has the same content.
        failed: number of inputs that could not be encoded; they have rows without tokens.
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
    """Append the new inputs of `config.sources` to the index, or resume a stopped append.

    Raises:
        UsageError: a setting of `config` is invalid, or the index was not made by a build.
        ModelError: the model bundle cannot be used, or another bundle built the index.
        JobStopped: the append stopped early. Finished shards are kept.
        FailedInputsError: no new input could be indexed, or more inputs failed than allowed. The index is unchanged.
        EdjeError: another process is changing the index, or another append or conversion has not finished.
    """
    started = time.monotonic()
    with changing(config.root, on_event) as index:
        prepared = prepare_append(config, index, on_event, should_stop)
        receipts = encode_rows(prepared, index, on_event, should_stop)
        group = SourceGroup(settings_of_rows(config, index).sources, config.column)
        change = RowChange(
            "append", np.empty(0, np.int64), lambda changed: with_further_source(index.manifest, changed, group)
        )
        manifest = commit_rows(prepared, index, receipts, change, on_event)
    return _result(prepared, receipts, manifest, time.monotonic() - started)


def _result(prepared: PreparedRows, receipts: list[ShardReceipt], manifest: Manifest, seconds: float) -> AppendResult:
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
