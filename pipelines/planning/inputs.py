"""The list of inputs of a build: made once from the sources, then read shard by shard from `build/inputs/`."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.planning.config import BuildConfig
from pipelines.planning.plan import BuildPlan
from pipelines.progress.events import OnEvent, Progress
from pipelines.progress.stopping import JobStopped, ShouldStop
from pipelines.progress.wording import counted
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from edje_index.images.inputs import InputRef
    from pipelines.sources import Source

_REPORT_EVERY = 1000  # inputs


@dataclass(frozen=True)
class FrozenInputs:
    """The inputs in `build/inputs/`.

    Attributes:
        rows: number of inputs.
        digest: SHA-256 over the inputs in row order.
        duplicates: inputs that are byte-identical to an earlier one.
        ignored: number of files that are not inputs, by extension.
        checksums: CRC-32C of each file, in hexadecimal.
    """

    rows: int
    digest: str
    duplicates: int
    ignored: dict[str, int]
    checksums: tuple[str, ...]


def freeze_inputs(config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop) -> FrozenInputs:
    """List the sources and write `build/inputs/`, one file per shard.

    Raises:
        UsageError: a source cannot be used, or there are no inputs.
        JobStopped: `should_stop()` returned True.
    """
    from edje_index.images.inputs import write_inputs
    from pipelines.sources import iter_all, mark_duplicates, open_sources
    from storage_formats.atomic import fsync_paths
    from storage_formats.format.checksum import crc32c_file, to_hex

    layout = Layout(config.out)
    directory = layout.inputs(0).parent
    sources = open_sources(config.sources, config.column)
    digest = hashlib.sha256()
    refs = _digested(iter_all(sources), digest, on_event, should_stop)
    if config.dedupe:
        refs = mark_duplicates(refs)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rows = duplicates = 0
    paths = []
    for shard in itertools.count():
        shard_refs = list(itertools.islice(refs, config.shard_size))
        if not shard_refs:
            break
        write_inputs(layout.inputs(shard), shard_refs)
        paths.append(layout.inputs(shard))
        rows += len(shard_refs)
        duplicates += sum(ref.duplicate_of is not None for ref in shard_refs)
    ignored = _count_ignored(sources)
    if not rows:
        raise UsageError(f"nothing to index in {', '.join(config.sources)}: {_no_images(ignored)}", parameter="sources")
    fsync_paths([*paths, directory])
    checksums = tuple(to_hex(crc32c_file(path)[1]) for path in paths)
    return FrozenInputs(rows, digest.hexdigest(), duplicates, ignored, checksums)


def check_frozen_inputs(plan: BuildPlan, shards: Iterable[int]) -> None:
    """Raise CorruptIndexError unless `build/inputs/` holds the lists of `shards` that the plan was made with."""
    from storage_formats.format.checksum import crc32c_file, to_hex

    for shard in shards:
        path = Layout(plan.root).inputs(shard)
        try:
            checksum = to_hex(crc32c_file(path)[1])
            damage = None if checksum == plan.input_checksums[shard] else "it has another checksum"
        except FileNotFoundError as error:
            damage = error.strerror
        if damage:
            raise CorruptIndexError(
                f"{path}, a list of inputs, was damaged after the build began ({damage}); restore the file, or remove "
                f"{plan.root} and build again"
            )


def check_inputs(config: BuildConfig, plan: BuildPlan, should_stop: ShouldStop) -> None:
    """Raise UsageError unless the sources still list the inputs that a finished index was built from."""
    from pipelines.sources import iter_all, open_sources

    digest = hashlib.sha256()
    sources = open_sources(config.sources, config.column)
    for _ in _digested(iter_all(sources), digest, lambda _: None, should_stop):
        pass
    if digest.hexdigest() != plan.inputs_digest:
        raise UsageError(_describe_changes(plan, iter_all(sources)), parameter="sources")


def _digested(refs: Iterable[InputRef], digest: Any, on_event: OnEvent, should_stop: ShouldStop) -> Iterator[InputRef]:
    """Yield `refs` unchanged, add each to `digest`, and report the progress."""
    for number, ref in enumerate(refs, 1):
        if should_stop():
            raise JobStopped("stopped while listing the sources; nothing was stored")
        digest.update(b"%d %a %d\0" % (ref.offset, ref.size, ref.member) + ref.path + b"\0\n")
        if number % _REPORT_EVERY == 0:
            on_event(Progress("listing the sources", number))
        yield ref


def _count_ignored(sources: list[Source]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for source in sources:
        total.update(source.ignored)
    return dict(sorted(total.items()))


def _no_images(ignored: dict[str, int]) -> str:
    kinds = ", ".join(f"{name} {count}" for name, count in ignored.items())
    return f"none of the files is an image ({kinds})" if kinds else "there are no files"


def _describe_changes(plan: BuildPlan, refs: Iterable[InputRef]) -> str:
    from storage_formats.format.rows import read_shard_rows

    sizes = {ref.uri: ref.size for ref in refs}
    stored = {}
    for shard in range(plan.spec.shards):
        rows = read_shard_rows(Layout(plan.root), shard, ["uri", "size"])
        stored.update({row["uri"]: row["size"] for row in rows.to_pylist()})
    new, missing = sizes.keys() - stored.keys(), stored.keys() - sizes.keys()
    resized = sum(sizes[uri] != stored[uri] for uri in sizes.keys() & stored.keys())
    return (
        f"the sources have changed since {plan.root} was built: {counted(len(stored), 'input')} then, {len(sizes)} now "
        f"({len(new)} new, {len(missing)} gone, {resized} of another size); choose another output directory"
    )
