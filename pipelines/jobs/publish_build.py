"""The last step of a build: the nearest-neighbour index and the manifest."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipelines.planning.plan import BuildPlan
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.wording import counted
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.receipts import ShardReceipt

_NAMED_FAILURES = 3


class FailedInputsError(EdjeError):
    """No input was indexed, or more failed than allowed.

    Attributes:
        problem: the message without what to do.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


def publish_build(plan: BuildPlan, receipts: list[ShardReceipt], *, max_failed: float, on_event: OnEvent) -> Manifest:
    """Build the nearest-neighbour index and commit the manifest.

    Raises:
        FailedInputsError: no input was indexed, or a larger share than `max_failed` failed.
        OSError: the index cannot be written.
    """
    from edje_index.indexing.faiss_index import build_ann
    from storage_formats.writing.publish import Provenance, finish_index

    _refuse_failures(plan, receipts, max_failed)
    on_event(StatusMessage("building the nearest-neighbour index"))
    ann = build_ann(plan.root, plan.spec)
    settings = {**asdict(plan.settings), "inputs_digest": plan.inputs_digest}
    return finish_index(plan.root, plan.spec, receipts, Provenance(plan.model, settings, plan.fingerprint), ann)


def _refuse_failures(plan: BuildPlan, receipts: list[ShardReceipt], max_failed: float) -> None:
    """Raise FailedInputsError if no input was indexed or more failed than allowed: the index would hide the cause."""
    failed: Counter[str] = Counter()
    for receipt in receipts:
        failed.update(receipt.failed)
    inputs = counted(plan.spec.rows, "input")
    remedy = f"correct the sources, remove {plan.root} and build again"
    if not any(receipt.indexed for receipt in receipts):
        problem = f"none of the {counted(failed.total(), 'input')} could be indexed"
    elif failed.total() > max_failed * plan.spec.rows:
        problem = f"{failed.total():,} of {inputs} failed, more than max_failed {max_failed:g}"
        remedy += ", or raise max_failed to publish the index as it is"
    else:
        return
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(failed.items()))
    names = ", ".join(_first_failures(plan, receipts))
    raise FailedInputsError(f"{problem} ({reasons}), so no index was written. The first are {names}", remedy)


def _first_failures(plan: BuildPlan, receipts: list[ShardReceipt]) -> list[str]:
    """Names and reasons of the first inputs that failed."""
    from storage_formats.format.rows import FAILED, read_shard_rows

    layout, columns = Layout(plan.root), ["uri", "status", "reason"]
    shards = (read_shard_rows(layout, receipt.shard, columns).to_pylist() for receipt in receipts if receipt.failed)
    failed = (f"{row['uri']} ({row['reason']})" for rows in shards for row in rows if row["status"] == FAILED)
    return list(itertools.islice(failed, _NAMED_FAILURES))
