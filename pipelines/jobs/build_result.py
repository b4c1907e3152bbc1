"""The result of a build."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.jobs.shard_run import ShardRun
from pipelines.progress.events import Bottleneck, bottleneck

if TYPE_CHECKING:
    from pipelines.planning.plan import BuildPlan
    from storage_formats.format.manifest import Manifest


@dataclass(frozen=True)
class BuildResult:
    """The result of a build.

    Attributes:
        inputs: number of all inputs; the sum of indexed, duplicates and failed.
        indexed: number of inputs that were encoded.
        duplicates: number of inputs that are byte-identical to an earlier input.
        failed: number of inputs that could not be encoded.
        failed_by_reason: number of failed inputs by reason.
        rows: number of rows of the index.
        shards: number of shards of the index.
        seconds: wall time of this run.
        images_per_second: rows that this run encoded per second after the listing; 0 if it encoded no row.
        bottleneck: stage in which the workers spent the most time; None if no times are known.
        stage_seconds: seconds per stage, summed over all shards. In `wait` (for decoded images), `encode` (the model)
            and `write`, they are seconds of the workers. `read` and `decode` are sums over the decoding threads. Empty
            if an earlier run had finished the index.
        already_finished: True if an earlier run had finished the index.
        truncated: number of indexed images that could be decoded only in part; None if an earlier run had finished the
            index.
        ignored: number of entries in the sources that are not inputs, by suffix or reason; None if an earlier run had
            finished the index, because only the plan of an unfinished build counts them.

    Example:
        >>> from pipelines import build_index
        >>> result = build_index("photos", "new.edje", "model", engine="inline")
        >>> result.inputs == result.indexed + result.duplicates + result.failed == 6
        True
    """

    inputs: int
    indexed: int
    duplicates: int
    failed: int
    failed_by_reason: dict[str, int]
    rows: int
    shards: int
    seconds: float
    images_per_second: float
    bottleneck: Bottleneck | None
    stage_seconds: dict[str, float]
    already_finished: bool = False
    truncated: int | None = None
    ignored: dict[str, int] | None = None


def build_result(manifest: Manifest, plan: BuildPlan, run: ShardRun | None, seconds: float) -> BuildResult:
    """Return the result of the build that committed `manifest`.

    `run` is None if an earlier run finished the index.
    """
    counts = manifest.counts
    stage_seconds: Counter[str] = Counter()
    for receipt in run.receipts if run else ():
        stage_seconds.update(receipt.seconds)
    return BuildResult(
        inputs=counts.inputs,
        indexed=counts.indexed,
        duplicates=counts.duplicates,
        failed=counts.failed_total,
        failed_by_reason=counts.failed,
        rows=manifest.spec.rows,
        shards=manifest.spec.shards,
        seconds=seconds,
        images_per_second=run.rows / run.seconds if run and run.rows else 0.0,
        bottleneck=bottleneck(stage_seconds),
        stage_seconds=dict(stage_seconds),
        already_finished=run is None,
        truncated=sum(receipt.truncated for receipt in run.receipts) if run else None,
        ignored=plan.ignored if run else None,
    )
