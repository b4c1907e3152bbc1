"""The repair job: rebuilds damaged files of an index from its other files and from the sources."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.build import ignore, never
from pipelines.jobs.encode_again import SourceEncoder
from pipelines.progress.events import OnEvent, Progress, ShouldStop, StatusMessage, progress_callback, stop_at_events
from storage_formats.format.layout import Layout
from storage_formats.format.object_store import local_path

if TYPE_CHECKING:
    from storage_formats.format.shard_table import FileEntry
    from storage_formats.shard_check import Problem
    from storage_formats.writing.repair import RepairedFile


@dataclass(frozen=True)
class RepairResult:
    """The result of a repair.

    Attributes:
        repaired: files that were repaired, or that would be repaired if `dry_run` is True.
        left: problems that remain, or that would remain if `dry_run` is True.
        dry_run: True if the repair was only tried and nothing was changed.

    Example:
        >>> from pathlib import Path
        >>> from pipelines import repair_index
        >>> Path("photos.edje/ann/index.faiss").unlink()
        >>> result = repair_index("photos.edje")
        >>> [(file.path, file.source) for file in result.repaired], result.left
        ([('ann/index.faiss', 'the embeddings')], ())
    """

    repaired: tuple[RepairedFile, ...]
    left: tuple[Problem, ...]
    dry_run: bool


def repair_index(
    index: str | Path,
    *,
    dry_run: bool = False,
    model: str | Path | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> RepairResult:
    """Verify an index, and rebuild damaged files from its other files, as `edje-index repair` does.

    Tokens that no other file determines are encoded again from the sources. A rebuilt file takes its place only if it
    has the committed checksum.

    Args:
        index: directory of the index.
        dry_run: True to find out what can be repaired, without a change to the index.
        model: directory of the model bundle; None selects the bundle that built the index.
        on_event: as in `build_index`.
        should_stop: as in `build_index`. `should_stop` is called after each progress event, and between
            batches of images.

    Raises:
        UsageError: there is no index at `index`.
        CorruptIndexError: `index.json` is damaged.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index.
        JobStopped: `should_stop()` returned True. Files that were repaired stay repaired.
        OSError: the index cannot be written.

    Example:
        >>> from pipelines import repair_index
        >>> repair_index("photos.edje").repaired
        ()
    """
    from storage_formats.change import begin_change, clear_staging, write_array_shapes
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.verify import verify_index
    from storage_formats.writing.repair import RepairedFile, ShardRepair

    stopped = "stopped; a dry run changes nothing" if dry_run else "stopped; files that were repaired stay repaired"
    on_event = stop_at_events(on_event, should_stop, stopped)
    root = local_path(index, advice="; to repair an index at a URL, download its objects and repair the directory")
    repaired: list[RepairedFile] = []
    refusals: list[Problem] = []
    settled: set[str] = set()
    with contextlib.ExitStack() as stack:
        change = None if dry_run else stack.enter_context(begin_change(root, "repair"))
        problems = verify_index(root, lambda done, total: on_event(Progress("verifying", done, total)))
        opened = CommittedIndex.open(root)
        layout, damaged = Layout(opened.root), {problem.path for problem in problems}
        metadata = [layout.relative(path) for path in layout.zarr_files(opened.manifest.spec.precisions)]
        repaired += [RepairedFile(path, "index.json") for path in metadata if path in damaged]
        if change is not None:
            clear_staging(layout.root)
            if repaired:
                write_array_shapes(layout, opened.manifest.spec)
        sources = SourceEncoder(opened, None if model is None else local_path(model), on_event, should_stop)
        files: dict[int, dict[str, FileEntry]] = {}
        for shard, file in opened.shard_files():
            files.setdefault(shard, {})[file.path] = file
        shards = {shard: entries for shard, entries in files.items() if damaged.intersection(entries)}
        for done, (shard, entries) in enumerate(shards.items()):
            on_event(Progress("repairing", done, len(shards)))
            encode_again = functools.partial(sources.encode, shard)
            repair = ShardRepair(opened, shard, entries, dry_run=dry_run, encode_again=encode_again)
            repaired += repair.run()
            tokens = {path for path in damaged.intersection(entries) if path.startswith("tokens/")}
            refusals += sources.problems(shard, tokens - repair.settled)
            settled |= repair.settled
        ann = [file.path for file in opened.manifest.ann_files if file.path in damaged]
        if ann and not any(path.startswith("embeddings/") for path in damaged):
            if change is not None:
                from edje_index.indexing.faiss_index import AnnRequest, replace_ann

                on_event(StatusMessage("building the nearest-neighbour index"))
                replace_ann(change, AnnRequest.like(opened.manifest.ann), progress_callback(on_event))
            repaired += [RepairedFile(path, "the embeddings") for path in ann]
    settled |= {file.path for file in repaired}
    left = [each for each in problems if each.path not in settled]
    return RepairResult(tuple(repaired), (*left, *refusals), dry_run)
