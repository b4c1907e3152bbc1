"""The split job: copies the shards of an index into several new indexes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.jobs.copy_shards import CopyJob, build_copied_ann, copy_shards
from pipelines.jobs.new_index import check_free, new_index
from pipelines.planning.recorded_sources import SOURCES_MEMBER
from pipelines.progress.events import OnEvent, StatusMessage
from pipelines.progress.stopping import ShouldStop
from storage_formats.errors import EdjeError, UsageError

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest
    from storage_formats.writing.shard_copy import CommittedShards
    from storage_formats.writing.split import IndexPart


@dataclass(frozen=True)
class SplitPart:
    """One of the indexes that a split wrote.

    Attributes:
        index: directory of the index.
        first_row: lowest row id. The rows keep the ids that they have in the index that was split.
        last_row: highest row id.
        rows: number of rows that are not deleted.
        shards: number of shards.
        lost_duplicates: number of failed rows that were duplicates of a row in another part.
    """

    index: str
    first_row: int
    last_row: int
    rows: int
    shards: int
    lost_duplicates: int


@dataclass(frozen=True)
class SplitResult:
    """The result of a split.

    Attributes:
        parts: the new indexes, in the order of their rows.
        seconds: wall time of this run.

    Example:
        >>> import shutil
        >>> from pipelines import merge_indexes, split_index
        >>> _ = shutil.copytree("photos.edje", "twin.edje")
        >>> _ = merge_indexes(["photos.edje", "twin.edje"], "twins.edje")
        >>> result = split_index("twins.edje", ["first.edje", "last.edje"])
        >>> [(part.first_row, part.rows) for part in result.parts]
        [(0, 6), (1024, 0)]
    """

    parts: tuple[SplitPart, ...]
    seconds: float


def run_split(
    root: Path, outs: Sequence[Path], on_event: OnEvent, should_stop: ShouldStop = lambda: False
) -> SplitResult:
    """Copy the current snapshot of the index at `root` into new indexes at `outs`, or resume a stopped split.

    Raises:
        UsageError: there is no index at `root`, a directory of `outs` exists or is given twice, or the index has fewer
            shards than `outs`.
        JobStopped: the split stopped early, or a file is damaged. Finished parts and shards are kept.
        EdjeError: another process is writing to one of `outs`.
    """
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.writing.shard_copy import CommittedShards
    from storage_formats.writing.split import plan_split

    started = time.monotonic()
    paths = [out.resolve() for out in outs]
    for position, path in enumerate(paths):
        if path in paths[:position]:
            raise UsageError(f"{outs[position]} is given twice; give each output directory only once", parameter="outs")
    index = CommittedIndex.open(root)
    parts = plan_split(index, len(outs))
    manifests = [_finished(part, out) for part, out in zip(parts, outs, strict=True)]
    shards = CommittedShards(index)
    results = []
    for part, out, finished in zip(parts, outs, manifests, strict=True):
        on_event(StatusMessage(f"part {part.number} of {part.parts}: {out}"))
        manifest = finished or _write_part(part, shards, out, on_event, should_stop)
        results.append(_result(out, manifest))
    return SplitResult(tuple(results), time.monotonic() - started)


def _finished(part: IndexPart, out: Path) -> Manifest | None:
    """Return the manifest of the part at `out` if an earlier run of the same split wrote it, or None if `out` is free.

    Raises:
        UsageError: `out` contains something else.
    """
    from storage_formats.format.manifest import Manifest

    try:
        manifest = Manifest.load(out)
    except EdjeError:
        manifest = None
    if manifest is not None and manifest.plan == part.plan and manifest.snapshot.number == 0:
        return manifest
    check_free(out)
    return None


def _write_part(
    part: IndexPart, shards: CommittedShards, out: Path, on_event: OnEvent, should_stop: ShouldStop
) -> Manifest:
    from storage_formats.writing.split import PartWriter, commit_part

    spec, whole = part.spec, part.index.manifest
    with new_index(out, part.plan, spec) as partial:
        writer = PartWriter(part, shards, partial)
        job = CopyJob.new(f"copying part {part.number}", partial, spec, part.plan)
        receipts = copy_shards(job, lambda shard, *_: writer.copy_shard(shard), on_event, should_stop)
        ann = build_copied_ann(partial, spec, [whole], on_event)
        return commit_part(part, partial, receipts, settings=_settings(part), ann=ann)


def _settings(part: IndexPart) -> dict[str, Any]:
    """Return the settings of the index, without its sources: an update would add the rows of the other parts again."""
    settings = {**part.index.manifest.settings, SOURCES_MEMBER: None}
    if "inputs_digest" in settings:
        settings["inputs_digest"] = hashlib.sha256(f"{settings['inputs_digest']} {part.shards}".encode()).hexdigest()
    return settings


def _result(out: Path, manifest: Manifest) -> SplitPart:
    from storage_formats.writing.split import ORIGINAL_ELSEWHERE

    spec = manifest.spec
    return SplitPart(
        index=str(out),
        first_row=spec.used_segments[0].first_row,
        last_row=spec.rows - 1,
        rows=manifest.counts.inputs - manifest.snapshot.deleted_rows,
        shards=sum(1 for _ in spec.shard_numbers()),
        lost_duplicates=manifest.counts.failed.get(ORIGINAL_ELSEWHERE.reason, 0),
    )
