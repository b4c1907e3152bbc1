"""Copies shards to an index, for compactions, merges and splits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipelines.engines.base import open_engine
from pipelines.jobs.shard_run import ShardJob, run_shards
from pipelines.progress.events import OnEvent, PlanReady, ShardState, ShouldStop, StatusMessage

if TYPE_CHECKING:
    from edje_index.indexing.faiss_index import AnnRequest
    from storage_formats.format.layout import IndexSpec
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.receipts import ShardReceipt


class CopyShard(Protocol):
    """Writes one shard, and returns its receipt."""

    def __call__(self, shard: int, on_rows: Callable[[int], None], should_stop: ShouldStop, /) -> ShardReceipt:
        """Write the shard with the number `shard`. `on_rows` takes the number of rows copied so far."""
        ...


@dataclass(frozen=True)
class CopyJob:
    """A job that copies shards in this process.

    Attributes:
        activity: name of the job in progress events.
        target: directory of the index to write to.
        shards: numbers of the shards to write, ascending.
        rows: number of rows in `shards`.
        finished: receipts of earlier runs, by shard number.
    """

    activity: str
    target: Path
    shards: Sequence[int]
    rows: int
    finished: Mapping[int, ShardReceipt]

    @classmethod
    def new(cls, activity: str, target: Path, spec: IndexSpec, plan: str) -> CopyJob:
        """Return the job that writes all shards of a new index. `plan` is the fingerprint in the receipts."""
        from storage_formats.format.layout import Layout
        from storage_formats.format.receipts import read_receipts

        shards = list(spec.shard_numbers())
        return cls(activity, target, shards, spec.used_rows, read_receipts(Layout(target), shards, plan))


@dataclass(frozen=True)
class ShardCopy:
    """Task that writes the new shard with the number `shard`."""

    shard: int


def copy_shards(job: CopyJob, copy_shard: CopyShard, on_event: OnEvent, should_stop: ShouldStop) -> list[ShardReceipt]:
    """Write the shards of `job` that are not finished. Return the receipts of all shards of `job`.

    Raises:
        JobStopped: `should_stop()` returned True, or a shard failed. Finished shards are kept.
    """
    from storage_formats.writing.begin import clear_staging

    clear_staging(job.target)
    on_event(PlanReady(job.rows, len(job.shards), len(job.finished)))
    shard_job = ShardJob(
        activity=job.activity,
        shards=job.shards,
        rows=job.rows,
        make_worker=lambda: functools.partial(_run_task, copy_shard),
        make_task=ShardCopy,
        state_of_report=lambda report: report,
        state_of_receipt=lambda receipt: ShardState(receipt.rows),
    )
    return run_shards(shard_job, dict(job.finished), open_engine("inline", None), on_event, should_stop).receipts


def _run_task(
    copy_shard: CopyShard, task: ShardCopy, on_progress: Callable[[Any], None], should_stop: ShouldStop
) -> ShardReceipt:
    return copy_shard(task.shard, lambda done: on_progress((task.shard, ShardState(done))), should_stop)


def build_copied_ann(
    root: Path, spec: IndexSpec, origins: Sequence[Manifest], on_event: OnEvent, *, replace_file: bool = True
) -> dict[str, Any]:
    """Build a nearest-neighbour index of copied rows, if one of their indexes has one.

    Args:
        root: directory of the index with the copied rows.
        spec: shape of the copied rows.
        origins: manifests of the indexes that the rows come from.
        on_event: receives the events of the job.
        replace_file: see `build_ann`.

    Returns:
        The entry of the nearest-neighbour index in the manifest.
    """
    searchable = [manifest for manifest in origins if manifest.ann_files]
    if not searchable:
        return origins[0].ann
    from edje_index.indexing.faiss_index import build_ann

    request = _ann_request(searchable, spec, on_event)
    on_event(StatusMessage("building the nearest-neighbour index"))
    ann = build_ann(root, spec, replace_file=replace_file, request=request)
    if request.ann not in ("auto", ann.get("factory", "Flat")):
        on_event(StatusMessage(f"there are too few rows for a nearest-neighbour index {request.ann}; it is Flat now"))
    return ann


def _ann_request(origins: Sequence[Manifest], spec: IndexSpec, on_event: OnEvent) -> AnnRequest:
    """Request the kind that the user chose for the indexes `origins`, and the highest of their target recalls.

    If all kinds are default kinds, request the default kind for the new number of rows, with the smallest codes of all
    `origins`. If the kinds differ, request the default kind.
    """
    from edje_index.indexing.ann_kind import AnnKind
    from edje_index.indexing.faiss_index import AnnRequest, default_position

    requests = [AnnRequest.like(manifest.ann) for manifest in origins]
    recall = max(request.recall for request in requests)
    positions = [position for position in map(default_position, origins) if position is not None]
    if len(positions) == len(origins):
        defaults = AnnKind.defaults(spec.used_rows, spec.embed_dim)
        return AnnRequest(defaults[min(max(positions), len(defaults) - 1)].factory, recall)
    kinds = sorted({request.ann for request in requests})
    if len(kinds) == 1:
        return AnnRequest(kinds[0], recall)
    differing = ", ".join(kinds)
    on_event(
        StatusMessage(f"nearest-neighbour indexes of different kinds ({differing}); the new one has the default kind")
    )
    return AnnRequest("auto", recall)
