"""Reads a finished index, or the plan and receipts of an unfinished index."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.planning.plan import BuildPlan, plan_of_manifest, read_plan
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.receipts import ShardReceipt


@dataclass(frozen=True)
class StoredBuild:
    """A build that earlier runs started.

    Attributes:
        plan: plan of the build.
        index: the finished index; None if the build is not finished.
        receipts: receipts of the finished shards, by shard number; empty if the build is finished.
    """

    plan: BuildPlan
    index: CommittedIndex | None = None
    receipts: dict[int, ShardReceipt] = field(default_factory=dict)


def read_stored_build(root: Path) -> StoredBuild | None:
    """Return the build that earlier runs started at `root`; None if there is no plan and no index.

    Raises:
        UsageError: the index at `root` was not made by a build.
        CorruptIndexError: the manifest or the plan is damaged.
    """
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.receipts import read_receipts

    layout = Layout(root)
    if layout.manifest.exists():
        index = CommittedIndex.open(root)
        return StoredBuild(plan_of_manifest(root, index.manifest), index)
    plan = read_plan(root)
    if plan is None:
        return None
    return StoredBuild(plan, receipts=read_receipts(layout, plan.shards, plan.fingerprint))
