"""Writes and checks the lists of inputs of a build, the files in `build/inputs/`."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.planning.columns import CollectedColumns
from pipelines.planning.config import BuildConfig
from pipelines.planning.plan import BuildPlan
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from edje_index.images.inputs import InputRef
    from storage_formats.format.source_columns import SourceColumn


@dataclass(frozen=True)
class FrozenInputs:
    """A summary of the lists of inputs in `build/inputs/`.

    Attributes:
        rows: number of inputs.
        digest: SHA-256 of the inputs in row order, in hexadecimal.
        duplicates: number of inputs that are byte-identical to an earlier input.
        ignored: number of entries in the sources that are not inputs, by suffix or reason.
        checksums: CRC-32C of each file in `build/inputs/`, in hexadecimal, by file name.
        columns: source columns of the inputs.
    """

    rows: int
    digest: str
    duplicates: int
    ignored: dict[str, int]
    checksums: dict[str, str]
    columns: tuple[SourceColumn, ...]


@contextlib.contextmanager
def removed_on_failure(root: Path) -> Iterator[None]:
    """Context manager that removes the plan and `build/inputs/` if the `with` block raises an exception."""
    try:
        yield
    except BaseException:
        layout = Layout(root)
        for plan in (layout.plan, layout.append_plan):
            plan.unlink(missing_ok=True)  # the plan may exist, even if flushing its directory failed
        shutil.rmtree(layout.input_lists, ignore_errors=True)
        raise


def freeze_inputs(config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop) -> FrozenInputs:
    """List the inputs of all sources, and write them to `build/inputs/`.

    Raises:
        UsageError: a source cannot be used, or the sources contain no inputs.
        JobStopped: `should_stop()` returned True.
    """
    from pipelines.sources import count_ignored, digested, iter_all, mark_duplicates, open_sources

    sources = open_sources(config.sources, config.column, clips=config.frames is not None)
    digest = hashlib.sha256()
    refs = digested(iter_all(sources), digest, on_event, should_stop)
    if config.dedupe:
        refs = mark_duplicates(refs)
    lists = store_inputs(Layout(config.out), refs, config.shard_size)
    ignored = {**count_ignored(sources), **lists.ignored}
    if not lists.rows:
        raise UsageError(
            f"there is nothing to index in {', '.join(config.sources)}: {_no_images(ignored)}", parameter="sources"
        )
    return FrozenInputs(lists.rows, digest.hexdigest(), lists.duplicates, ignored, lists.checksums, lists.columns)


@dataclass(frozen=True)
class InputLists:
    """A summary of the files that `store_inputs` wrote. `FrozenInputs` describes the fields."""

    rows: int
    duplicates: int
    ignored: dict[str, int]
    checksums: dict[str, str]
    columns: tuple[SourceColumn, ...]


def store_inputs(
    layout: Layout,
    refs: Iterable[InputRef],
    shard_size: int,
    *,
    first_shard: int = 0,
    earlier_columns: Iterable[SourceColumn] = (),
) -> InputLists:
    """Write `refs` to `build/inputs/`. Existing files in this directory are removed.

    Args:
        layout: paths of the index.
        refs: inputs in row order.
        shard_size: number of inputs per shard.
        first_shard: number of the first shard.
        earlier_columns: source columns of the existing rows of the index.

    Raises:
        OSError: a file cannot be written.
    """
    from edje_index.images.input_lists import write_input_lists
    from storage_formats.atomic import fsync_paths
    from storage_formats.format.checksum import crc32c_file, to_hex

    directory = layout.input_lists
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rows = duplicates = 0
    columns = CollectedColumns(shard_size, earlier_columns)

    def counted_refs() -> Iterator[InputRef]:
        nonlocal rows, duplicates
        for ref in refs:
            rows += 1
            duplicates += ref.duplicate_of is not None
            yield columns.add(ref)

    paths = write_input_lists(layout, counted_refs(), shard_size, first_shard=first_shard)
    fsync_paths([*paths, directory])
    checksums = {path.name: to_hex(crc32c_file(path)[1]) for path in paths}
    return InputLists(rows, duplicates, dict(columns.ignored), checksums, columns.columns())


def check_frozen_inputs(plan: BuildPlan, finished_shards: Collection[int]) -> None:
    """Check that the lists of inputs are unchanged, unless all shards are finished.

    Raises:
        CorruptIndexError: a list of inputs is missing or was changed.
    """
    from storage_formats.format.checksum import crc32c_file, to_hex

    if len(finished_shards) == len(plan.shards):
        return
    for name, checksum in plan.input_checksums.items():
        path = Layout(plan.root).input_lists / name
        try:
            damage = None if to_hex(crc32c_file(path)[1]) == checksum else "the checksum differs"
        except FileNotFoundError as error:
            damage = error.strerror
        if damage:
            kind = "append" if plan.is_append else "build"
            raise CorruptIndexError(
                f"the list of inputs {path} was damaged after the {kind} began ({damage}); restore the file, "
                f"or {plan.restart}"
            )


def _no_images(ignored: dict[str, int]) -> str:
    kinds = ", ".join(f"{name} {count}" for name, count in ignored.items())
    return f"none of the files is an image ({kinds})" if kinds else "there are no files"
