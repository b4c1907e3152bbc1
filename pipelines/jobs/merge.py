"""The merge job: copies the shards of several indexes into a new index."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.jobs.copy_shards import CopyJob, build_copied_ann, copy_shards
from pipelines.jobs.new_index import new_index
from pipelines.planning.recorded_sources import SOURCES_MEMBER, holds_clips, recorded_sources
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest
    from storage_formats.writing.merge import Merge


@dataclass(frozen=True)
class MergedInput:
    """One of the indexes that were merged.

    Attributes:
        index: directory of the index.
        offset: number that is added to the row ids of this index to get the row ids in the merged index.
        rows: number of rows, including deleted rows and duplicates.
        duplicates: number of rows that are deleted in the merged index, because an earlier index has the same content.
    """

    index: str
    offset: int
    rows: int
    duplicates: int


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge.

    Attributes:
        inputs: the merged indexes, in the order of their rows.
        rows: number of rows of the new index that are not deleted.
        duplicates: number of rows that are deleted in the new index, because an earlier index has the same content.
        shards: number of shards of the new index.
        seconds: wall time of this run.

    Example:
        >>> from pipelines import append_index, build_index, merge_indexes
        >>> _ = build_index("photos/0.jpg", "more.edje", "model", engine="inline", threads=1)
        >>> result = merge_indexes(["photos.edje", "more.edje"], "all.edje")
        >>> result.rows, result.duplicates, [each.offset for each in result.inputs]
        (6, 1, [0, 1024])
    """

    inputs: tuple[MergedInput, ...]
    rows: int
    duplicates: int
    shards: int
    seconds: float


def run_merge(
    indexes: Sequence[Path], out: Path, on_event: OnEvent, should_stop: ShouldStop = lambda: False
) -> MergeResult:
    """Copy the current snapshots of `indexes` into a new index at `out`, or resume a stopped merge.

    Raises:
        UsageError: an index does not exist, the indexes differ in model, block shape, shard size, precisions or frames
            per clip, or `out` exists.
        JobStopped: the merge stopped early, or a file is damaged. Finished shards are kept.
        EdjeError: another process is writing to `out`.
    """
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.merge import ShardMover, commit_merge, plan_merge

    started = time.monotonic()
    merge = plan_merge([CommittedIndex.open(root) for root in indexes])
    settings = _settings(merge)
    with new_index(out, merge.plan, merge.spec) as partial:
        mover = ShardMover(merge, partial)
        job = CopyJob.new("copying", partial, merge.spec, merge.plan)
        receipts = copy_shards(job, lambda shard, *_: mover.copy_shard(shard), on_event, should_stop)
        ann = build_copied_ann(partial, merge.spec, [each.index.manifest for each in merge.inputs], on_event)
        on_event(StatusMessage("looking for duplicates"))
        manifest = commit_merge(merge, partial, receipts, settings=settings, ann=ann)
    return _result(indexes, manifest, len(receipts), time.monotonic() - started)


def _settings(merge: Merge) -> dict[str, Any]:
    """Return the settings of the first index, with the sources of all indexes."""
    manifests = [each.index.manifest for each in merge.inputs]
    settings = {name: value for name, value in manifests[0].settings.items() if name != SOURCES_MEMBER}
    _check_frames(manifests)
    digests = [manifest.settings.get("inputs_digest") for manifest in manifests]
    if None not in digests:
        settings["inputs_digest"] = hashlib.sha256(" ".join(map(str, digests)).encode()).hexdigest()
    groups = [recorded_sources(manifest) for manifest in manifests]
    if None in groups:
        return settings
    every = dict.fromkeys(group for of_input in groups for group in of_input or ())
    return {**settings, SOURCES_MEMBER: [asdict(group) for group in every]}


def _check_frames(manifests: Sequence[Manifest]) -> None:
    """Raise UsageError if two indexes have different numbers of frames per clip. Images count as another number."""
    numbers = {str(manifest.settings["frames"]) if holds_clips(manifest) else "images only" for manifest in manifests}
    if len(numbers) > 1:
        raise UsageError(
            f"the indexes have different numbers of frames per clip ({', '.join(sorted(numbers))}); build "
            "them with the same number, or keep them apart",
            parameter="indexes",
        )


def _result(indexes: Sequence[Path], manifest: Manifest, shards: int, seconds: float) -> MergeResult:
    merged = tuple(
        MergedInput(str(root), each["offset"], each["rows"], each["duplicates"])
        for root, each in zip(indexes, manifest.snapshot.change["inputs"], strict=True)
    )
    rows = manifest.counts.inputs - manifest.snapshot.deleted_rows
    return MergeResult(merged, rows, sum(each.duplicates for each in merged), shards, seconds)
