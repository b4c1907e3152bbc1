"""The repair job: rebuilds damaged files of an index from its other files and from the sources."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.build import ignore, never
from pipelines.jobs.encode_again import SourceEncoder
from pipelines.progress.events import OnEvent, Progress, ShouldStop, StatusMessage, progress_callback, stop_at_events
from storage_formats.format.layout import Layout
from storage_formats.format.object_store import local_path

if TYPE_CHECKING:
    from storage_formats.change import Change
    from storage_formats.format.manifest import CommittedIndex
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


def repair_index(
    index: str | Path,
    *,
    dry_run: bool = False,
    model: str | Path | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> RepairResult:
    """Verify an index, and rebuild damaged files from its other files, as `edje-index repair` does.

    Tokens that no other file determines are encoded again from the sources.

    Args:
        index: directory or URL of the index. The objects of an index at a URL are downloaded shard by shard, for up to
            four shards at the same time.
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
    from storage_formats.change import begin_change
    from storage_formats.format.manifest import CommittedIndex, Manifest
    from storage_formats.verified_files import verified_files
    from storage_formats.verify import verify
    from storage_formats.writing.working_copy import working_copy

    stopped = "stopped; a dry run changes nothing" if dry_run else "stopped; files that were repaired stay repaired"
    on_event = stop_at_events(on_event, should_stop, stopped)

    def on_progress(done: int, total: int) -> None:
        on_event(Progress("verifying", done, total))

    with contextlib.ExitStack() as stack:
        copy = stack.enter_context(working_copy(index, read_only=dry_run))
        change = None if dry_run else stack.enter_context(begin_change(copy.root, "repair"))
        files = stack.enter_context(verified_files(index))
        verification = verify(index, on_progress)
        problems = verification.problems
        opened = CommittedIndex(files.root.absolute(), Manifest.load(files.root))
        sources = SourceEncoder(opened, None if model is None else local_path(model), on_event, should_stop)
        repaired, settled, refusals = _repair(files, opened, problems, sources, on_event, dry_run=dry_run)
        repaired += _repair_ann(opened, copy, change, {each.path for each in problems}, on_event)
    settled |= {file.path for file in repaired}
    if not dry_run and repaired:
        on_event(StatusMessage("verifying the repairs"))
        problems, settled = verify(index, on_progress, earlier=verification).problems, set()
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
    from storage_formats.change import clear_staging
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
    from storage_formats.change import write_array_shapes
    from storage_formats.writing.remote_writes import zarr_entries
    from storage_formats.writing.repair import RepairedFile

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
    index: CommittedIndex, copy: WorkingCopy, change: Change | None, damaged: set[str], on_event: OnEvent
) -> Iterator[RepairedFile]:
    """Build a damaged nearest-neighbour index again, and yield its files. If embeddings are damaged too, do nothing.

    `change` is None if nothing is to be written.
    """
    from storage_formats.writing.repair import RepairedFile

    paths = [file.path for file in index.manifest.ann_files if file.path in damaged]
    if not paths or any(path.startswith("embeddings/") for path in damaged):
        return
    if change is not None:
        from edje_index.indexing.faiss_index import AnnRequest, replace_ann
        from pipelines.jobs.ann import download_embeddings
        from storage_formats.format.manifest import CommittedIndex
        from storage_formats.writing.remote_writes import overwrite_file

        download_embeddings(copy, on_event)
        on_event(StatusMessage("building the nearest-neighbour index"))
        request = AnnRequest.like(index.manifest.ann)
        built = CommittedIndex(copy.root, replace_ann(change, request, progress_callback(on_event)))
        for file in built.manifest.ann_files:
            if copy.remote is not None and file.path in damaged:  # a change uploads no file that the index has already
                overwrite_file(copy.remote, built, file)
        copy.remove_unnamed_objects()
    yield from (RepairedFile(path, "the embeddings") for path in paths)
