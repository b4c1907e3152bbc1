"""The repair job: rebuilds damaged files of an index from its other files and from the sources."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.encode_again import SourceEncoder
from pipelines.jobs.leftovers import refuse_unfinished_append
from pipelines.jobs.lock import locked_index
from pipelines.progress.events import OnEvent, Progress, ShouldStop, StatusMessage, progress_callback, stop_at_events
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.object_store import IndexLocation
    from storage_formats.format.shard_table import FileEntry
    from storage_formats.shard_check import Problem
    from storage_formats.verified_files import VerifiedFiles
    from storage_formats.writing.repair import RepairedFile
    from storage_formats.writing.working_copy import WorkingCopy


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


def run_repair(
    location: IndexLocation,
    on_event: OnEvent,
    should_stop: ShouldStop = lambda: False,
    *,
    dry_run: bool = False,
    model: Path | None = None,
) -> RepairResult:
    """Verify the index at `location`, and rebuild damaged files from the other files of the index.

    Tokens that no other file determines are encoded again from the sources.

    Args:
        location: directory or URL of the index. The objects of an index at a URL are downloaded shard by
            shard, for up to four shards at the same time.
        on_event: function that receives progress events.
        should_stop: function that is called after each progress event, and between batches of images.
        dry_run: True to find out what can be repaired, without a change to the index.
        model: directory of the model bundle; None selects the bundle that built the index.

    Raises:
        UsageError: there is no index at `location`.
        CorruptIndexError: `index.json` is damaged.
        EdjeError: another process is changing the index, or an append, update or retry has not finished.
        JobStopped: `should_stop()` returned True. Files that were repaired stay repaired.
        OSError: the index cannot be written.
    """
    from storage_formats.format.manifest import CommittedIndex, Manifest
    from storage_formats.verified_files import verified_files
    from storage_formats.verify import verify
    from storage_formats.writing.working_copy import working_copy

    stopped = "stopped; a dry run changes nothing" if dry_run else "stopped; files that were repaired stay repaired"
    on_event = stop_at_events(on_event, should_stop, stopped)

    def on_progress(done: int, total: int) -> None:
        on_event(Progress("verifying", done, total))

    with working_copy(location, read_only=dry_run) as copy:
        CommittedIndex.open(copy.root)  # fails before the lock makes a directory
        with contextlib.nullcontext() if dry_run else locked_index(copy.root), verified_files(location) as files:
            if not dry_run:
                refuse_unfinished_append(CommittedIndex.open(copy.root))
            verification = verify(location, on_progress)
            problems = verification.problems
            index = CommittedIndex(files.root.absolute(), Manifest.load(files.root))
            sources = SourceEncoder(index, model, on_event, should_stop)
            repaired, settled, refusals = _repair(files, index, problems, sources, on_event, dry_run=dry_run)
            repaired += _repair_ann(index, copy, {each.path for each in problems}, on_event, dry_run=dry_run)
    settled |= {file.path for file in repaired}
    if not dry_run and repaired:
        on_event(StatusMessage("verifying the repairs"))
        problems, settled = verify(location, on_progress, earlier=verification).problems, set()
    left = [each for each in problems if each.path not in settled]
    return RepairResult(tuple(repaired), (*left, *map(files.describe, refusals)), dry_run)


def _repair(
    files: VerifiedFiles,
    index: CommittedIndex,
    problems: list[Problem],
    sources: SourceEncoder,
    on_event: OnEvent,
    *,
    dry_run: bool,
) -> tuple[list[RepairedFile], set[str], list[Problem]]:
    """Repair Zarr metadata, tokens and checksums.

    Returns:
        The repaired files, the paths of all files that have no problem after the repair, and the reasons why token
        files could not be rebuilt from the sources.
    """
    from storage_formats.writing.begin import clear_staging
    from storage_formats.writing.repair import ShardRepair

    if not dry_run:
        clear_staging(index.root)
    damaged = {problem.path for problem in problems}
    repaired, settled = list(_repair_metadata(files, index, damaged, dry_run=dry_run)), set[str]()
    refusals: list[Problem] = []
    shards = _damaged_shards(index, damaged)
    try:
        for done, (shard, entries) in enumerate(shards.items()):
            on_event(Progress("repairing", done, len(shards)))
            encode_again = functools.partial(sources.encode, shard)
            repair = ShardRepair(index, shard, entries, dry_run=dry_run, encode_again=encode_again)
            with files.at_hand(entries):
                of_shard = list(repair.run())
                if not dry_run:
                    files.publish([entries[file.path] for file in of_shard])
                tokens = {path for path in damaged.intersection(entries) if path.startswith("tokens/")}
                refusals += sources.problems(shard, tokens - repair.settled)
            repaired += of_shard
            settled |= repair.settled
    finally:
        with contextlib.suppress(OSError):
            Layout(index.root).staging.rmdir()
    return repaired, settled, refusals


def _repair_metadata(
    files: VerifiedFiles, index: CommittedIndex, damaged: set[str], *, dry_run: bool
) -> Iterator[RepairedFile]:
    from storage_formats.writing.remote_writes import zarr_entries
    from storage_formats.writing.repair import RepairedFile
    from storage_formats.writing.snapshots import write_array_shapes

    layout, spec = Layout(index.root), index.manifest.spec
    paths = [layout.relative(path) for path in layout.zarr_files(spec.precisions)]
    yield from (RepairedFile(path, "index.json") for path in paths if path in damaged)
    if not dry_run and damaged.intersection(paths):
        write_array_shapes(layout, spec)
        files.publish([entry for entry in zarr_entries(index) if entry.path in damaged])


def _damaged_shards(index: CommittedIndex, damaged: set[str]) -> dict[int, dict[str, FileEntry]]:
    """Return the file entries of each shard with a damaged file, keyed by shard number and by path."""
    from storage_formats.format.shard_table import read_shard_tables

    files: dict[int, dict[str, FileEntry]] = {}
    for shard, file in read_shard_tables(index.root, index.manifest.shard_tables):
        files.setdefault(shard, {})[file.path] = file
    return {shard: entries for shard, entries in files.items() if damaged.intersection(entries)}


def _repair_ann(
    index: CommittedIndex, copy: WorkingCopy, damaged: set[str], on_event: OnEvent, *, dry_run: bool
) -> Iterator[RepairedFile]:
    """Build a damaged nearest-neighbour index again, and yield its files. If embeddings are damaged too, do nothing."""
    from storage_formats.writing.repair import RepairedFile

    paths = [file.path for file in index.manifest.ann_files if file.path in damaged]
    if not paths or any(path.startswith("embeddings/") for path in damaged):
        return
    if not dry_run:
        from edje_index.indexing.faiss_index import AnnRequest, add_ann
        from pipelines.jobs.ann import download_embeddings
        from storage_formats.format.manifest import CommittedIndex
        from storage_formats.writing.remote_writes import overwrite_file

        download_embeddings(copy, on_event)
        on_event(StatusMessage("building the nearest-neighbour index"))
        request = AnnRequest.like(index.manifest.ann)
        built = CommittedIndex(copy.root, add_ann(copy.root, request, progress_callback(on_event)))
        for file in built.manifest.ann_files:
            if copy.remote is not None and file.path in damaged:  # a change uploads no file that the index has already
                overwrite_file(copy.remote, built, file)
        copy.remove_unnamed_objects()
    yield from (RepairedFile(path, "the embeddings") for path in paths)
