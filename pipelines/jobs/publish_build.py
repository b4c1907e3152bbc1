"""The last step of a build: builds the nearest-neighbour index and commits the manifest."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from pipelines.planning.plan import BuildPlan
from pipelines.progress.events import OnEvent, StatusMessage

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.receipts import ShardReceipt


def publish_build(
    plan: BuildPlan, receipts: list[ShardReceipt], on_event: OnEvent, *, memory: int | None = None
) -> Manifest:
    """Build the nearest-neighbour index and commit the manifest. Return the manifest.

    `BuildConfig` describes `memory`.

    Raises:
        UsageError: the nearest-neighbour index needs more memory than `memory`.
        OSError: the index cannot be written.
    """
    from edje_index.indexing.faiss_index import AnnRequest, build_ann
    from storage_formats.writing.publish import Provenance, finish_index

    on_event(StatusMessage("building the nearest-neighbour index"))
    ann = build_ann(plan.root, plan.spec, request=AnnRequest(memory=memory))
    settings = {**asdict(plan.settings), "inputs_digest": plan.inputs_digest}
    provenance = Provenance(plan.model, settings, plan.fingerprint)
    return finish_index(plan.root, plan.spec, receipts, provenance, ann, plan.columns)
