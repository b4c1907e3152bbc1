"""The last step of a build: the nearest-neighbour index and the manifest."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.planning.plan import BuildPlan
from pipelines.progress.events import OnEvent, StatusMessage
from storage_formats.errors import EdjeError

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.receipts import ShardReceipt


def publish_build(plan: BuildPlan, receipts: list[ShardReceipt], on_event: OnEvent) -> Manifest:
    """Build the nearest-neighbour index and commit the manifest.

    Raises:
        EdjeError: no input was indexed.
        OSError: the index cannot be written.
    """
    from edje_index.indexing.faiss_index import build_ann
    from storage_formats.writing.publish import Provenance, finish_index

    _refuse_empty(plan.root, receipts)
    on_event(StatusMessage("building the nearest-neighbour index"))
    ann = build_ann(plan.root, plan.spec)
    settings = {**asdict(plan.settings), "inputs_digest": plan.inputs_digest}
    return finish_index(plan.root, plan.spec, receipts, Provenance(plan.model, settings, plan.fingerprint), ann)


def _refuse_empty(root: Path, receipts: list[ShardReceipt]) -> None:
    """Raise EdjeError if no input was indexed: an empty index would only hide the cause."""
    if any(receipt.indexed for receipt in receipts):
        return
    failed: Counter[str] = Counter()
    for receipt in receipts:
        failed.update(receipt.failed)
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(failed.items()))
    raise EdjeError(
        f"none of the {failed.total():,} inputs could be indexed ({reasons}), so no index was written; "
        f"correct the sources, remove {root} and build again"
    )
