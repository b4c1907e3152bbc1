"""The retry-failed job: tries to index failed inputs again."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipelines.jobs.new_rows import RowChange, changing, commit_rows, encode_rows
from pipelines.planning.config import AppendConfig
from pipelines.planning.new_rows import discard_rows, resume_or_plan
from pipelines.planning.retry_failed import FailedInputs, find_failed
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.receipts import ShardReceipt


@dataclass(frozen=True)
class RetryResult:
    """The result of a retry of failed inputs.

    Attributes:
        retried: number of failed rows before the retry.
        inputs: number of inputs that were read again; the sum of indexed, duplicates and failed. A failed row of a
            damaged archive stands for all inputs in the archive.
        indexed: number of inputs that were encoded.
        duplicates: number of inputs that got no new row, because another row has the same content.
        failed: number of inputs that failed again.
        failed_by_reason: number of inputs that failed again, by their new reason.
        first_row: row id of the first new row; None if there is no new row.
        rows: number of new rows, including rows of inputs that failed again.
        snapshot: number of the current snapshot. If every input failed again for the same reason, there is no new
            snapshot.
        seconds: wall time of this run.

    Example:
        >>> from pipelines import retry_failed
        >>> result = retry_failed("photos.edje", engine="inline")
        >>> result.retried, result.snapshot
        (0, 0)
    """

    retried: int
    inputs: int
    indexed: int
    duplicates: int
    failed: int
    failed_by_reason: dict[str, int]
    first_row: int | None
    rows: int
    snapshot: int
    seconds: float


def run_retry_failed(config: AppendConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> RetryResult:
    """Try to index the failed inputs of an index again. `config.sources` is not used.

    One snapshot deletes the old failed rows and adds new rows. An input that fails again gets a new failed row with the
    new reason.

    Raises:
        UsageError: a setting of `config` is invalid, or the index was not made by a build.
        ModelError: the model bundle cannot be used, or another bundle built the index.
        JobStopped: the retry stopped early. Finished shards are kept.
        TransientInputError: an input cannot be read for a temporary reason.
        EdjeError: another process is changing the index, or another change has not finished.
    """
    started = time.monotonic()
    with changing(config.root, on_event) as index:
        found = find_failed(index)
        prepared = resume_or_plan(replace(config, max_failed=1.0), index, "retry-failed", found.new)
        receipts = encode_rows(prepared, index, on_event, should_stop)
        manifest = index.manifest
        if _is_unchanged(found, receipts, index):
            discard_rows(index)
        else:
            change = RowChange("retry-failed", found.row_ids, lambda changed: changed)
            manifest = commit_rows(prepared, index, receipts, change, on_event)
    indexed, failed = sum(receipt.indexed for receipt in receipts), _failed_by_reason(receipts)
    is_new = manifest.snapshot.number != index.manifest.snapshot.number
    has_rows = is_new and bool(receipts)
    return RetryResult(
        retried=len(found.row_ids),
        inputs=found.inputs,
        indexed=indexed,
        duplicates=found.new.duplicates,
        failed=sum(failed.values()),
        failed_by_reason=failed,
        first_row=manifest.spec.used_segments[-1].first_row if has_rows else None,
        rows=indexed + sum(failed.values()) if has_rows else 0,
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
    )


def _is_unchanged(found: FailedInputs, receipts: list[ShardReceipt], index: CommittedIndex) -> bool:
    """Return True if every input failed again for the same reason as before."""
    from storage_formats.format.rows import read_shard_rows

    if any(receipt.indexed for receipt in receipts) or found.new.duplicates:
        return False
    shards = sorted(receipt.shard for receipt in receipts)
    tables = [read_shard_rows(Layout(index.root), shard, ["reason"]) for shard in shards]
    return sorted(found.reasons) == sorted(reason for table in tables for reason in table["reason"].to_pylist())


def _failed_by_reason(receipts: list[ShardReceipt]) -> dict[str, int]:
    from storage_formats.writing.publish import total_counts

    return total_counts(receipts).failed
