"""The quantize job: adds and removes precisions of the tokens in a finished index."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engines.base import Engine, TaskInterrupted, Worker, describe_error
from pipelines.jobs.leftovers import discard_stopped_copy, refuse_unfinished_append
from pipelines.jobs.lock import locked_index
from pipelines.jobs.shard_run import ShardJob, run_shards
from pipelines.jobs.shared_directory import on_shared_directory
from pipelines.planning.machine import free_disk
from pipelines.progress.events import JobStopped, OnEvent, PlanReady, ShardState, ShouldStop
from pipelines.progress.wording import counted
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout, padded_shard_bytes

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.object_store import IndexLocation
    from storage_formats.format.receipts import ShardReceipt
    from storage_formats.writing.conversion import ConversionTask


@dataclass(frozen=True)
class QuantizeConfig:
    """A request to add or remove precisions.

    Attributes:
        root: directory of the index.
        to: precisions to add.
        drop: precisions to remove, after all precisions in `to` have been added.
        source: precision to convert from. None takes the highest-fidelity precision stored. In this case, no precision
            in `to` may have a higher fidelity than the source.
    """

    root: Path
    to: tuple[str, ...]
    drop: tuple[str, ...] = ()
    source: str | None = None


@dataclass(frozen=True)
class QuantizeResult:
    """The result of a conversion.

    Attributes:
        source: precision that was read; None if nothing was converted.
        added: precisions that were added.
        dropped: precisions that were removed.
        precisions: precisions that the index stores after the conversion.
        rows: number of rows of the index.
        shards: number of shards of the index.
        bytes_per_image: length of a record in bytes, by precision.
        seconds: wall time of this run.

    Example:
        >>> from pipelines import quantize_index
        >>> result = quantize_index("photos.edje", ["int8"])
        >>> result.source, result.added, result.dropped
        ('bf16', ('int8',), ())
    """

    source: str | None
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    precisions: tuple[str, ...]
    rows: int
    shards: int
    bytes_per_image: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class _Conversion:
    """A conversion to run.

    Attributes:
        root: directory of the index.
        spec: sizes and precisions of the index.
        source: precision to read.
        targets: precisions to add.
        source_digest: SHA-256 of the lengths and checksums of the files of `source`.
    """

    root: Path
    spec: IndexSpec
    source: str
    targets: tuple[str, ...]
    source_digest: str

    @property
    def plan(self) -> str:
        """Return the fingerprint of the conversion. The receipts of the conversion contain this fingerprint."""
        text = f"convert {self.spec} {self.source} {self.targets} {self.source_digest}"
        return hashlib.sha256(text.encode()).hexdigest()


def quantize_at(
    location: IndexLocation,
    make_config: Callable[[Path], QuantizeConfig],
    engine: Engine,
    on_event: OnEvent,
    should_stop: ShouldStop = lambda: False,
) -> QuantizeResult:
    """Add or remove precisions of the index at `location`, a directory or a URL. See `run_quantize` for the errors.

    `make_config` takes the directory of the index and returns the request. If `location` is a URL, the directory is a
    working copy; see `storage_formats.writing.working_copy` for its errors.
    """
    from storage_formats.writing.working_copy import working_copy

    with working_copy(location) as copy:
        config = make_config(copy.root)
        result = run_quantize(config, engine, on_event, should_stop)
        if config.drop:
            copy.remove_unnamed_objects()
    return result


def run_quantize(
    config: QuantizeConfig, engine: Engine, on_event: OnEvent, should_stop: ShouldStop = lambda: False
) -> QuantizeResult:
    """Add the precisions in `config.to` that the index lacks, then remove the precisions in `config.drop`.

    Raises:
        UsageError: there is no index, the precisions are invalid, or the disk is too small.
        CorruptIndexError: the index is damaged.
        JobStopped: the conversion stopped early. Finished shards are kept.
        EdjeError: another process is changing the index, or an append to the index has not finished.
    """
    from storage_formats.format.manifest import CommittedIndex, Manifest
    from storage_formats.writing.conversion import drop_precision, remove_leftovers
    from storage_formats.writing.publish import has_build_leftovers, remove_build

    started = time.monotonic()
    before = Manifest.load(config.root)
    with locked_index(config.root):
        manifest = Manifest.load(config.root)
        layout = Layout(config.root)
        if has_build_leftovers(layout):
            remove_build(layout)
        index = CommittedIndex.open(config.root)
        refuse_unfinished_append(index)
        missing = tuple(name for name in dict.fromkeys(config.to) if name not in manifest.spec.precisions)
        _check_names(config, (*manifest.spec.precisions, *missing))
        if not missing or layout.compaction.exists():
            discard_stopped_copy(index, on_event)
        source = precision_to_read(config.root, manifest, config.source) if missing else None
        if source is not None:
            if config.source is None:
                _refuse_higher_fidelity(config.root, manifest, source, missing)
            digest = _source_digest(config.root, manifest, source)
            conversion = _Conversion(config.root, manifest.spec, source, missing, digest)
            manifest = _convert(conversion, engine, on_event, should_stop)
        for name in config.drop:
            if name in manifest.spec.precisions:
                manifest = drop_precision(config.root, name)
        remove_leftovers(config.root)
    return QuantizeResult(
        source=source,
        added=missing,
        dropped=tuple(name for name in before.spec.precisions if name not in manifest.spec.precisions),
        precisions=manifest.spec.precisions,
        rows=manifest.spec.used_rows,
        shards=manifest.spec.used_shards,
        bytes_per_image={name: _record_bytes(manifest.spec, name) for name in manifest.spec.precisions},
        seconds=time.monotonic() - started,
    )


def precision_to_read(root: Path, manifest: Manifest, requested: str | None) -> str:
    """Return the precision to convert from: `requested`, or the most accurate precision stored.

    If several precisions are equally accurate, the precision with the fewest conversions wins.

    Raises:
        UsageError: the index at `root` does not store `requested`.
    """
    stored = manifest.spec.precisions
    if requested is None:
        return min(stored, key=lambda name: (_rank(_least_accurate(manifest, name)), len(_origin(manifest, name))))
    if requested not in stored:
        raise UsageError(
            f"{root} does not have precision '{requested}'; convert from one of {', '.join(stored)}",
            parameter="source",
        )
    return requested


def _origin(manifest: Manifest, name: str) -> tuple[str, ...]:
    return manifest.encoded_from.get(name, ())


def _least_accurate(manifest: Manifest, name: str) -> str:
    """Return the least accurate precision in the chain of conversions that ends at `name`."""
    return max((name, *_origin(manifest, name)), key=_rank)


def _rank(name: str) -> int:
    """Return the rank of a precision. 0 is the most accurate, and unknown precisions come last."""
    from storage_formats.codecs import precisions

    names = precisions()
    return names.index(name) if name in names else len(names)


def _refuse_higher_fidelity(root: Path, manifest: Manifest, source: str, targets: tuple[str, ...]) -> None:
    """Raise UsageError if a target has a higher fidelity than `source`."""
    lossy = _least_accurate(manifest, source)
    for name in targets:
        if _rank(name) < _rank(lossy):
            raise UsageError(
                f"'{name}' would be larger but not more accurate, because all tokens in {root} have the errors of "
                f"'{lossy}'. Build the index again with '{name}', or set the source to '{source}' to convert anyway",
                parameter="source",
            )


def _source_digest(root: Path, manifest: Manifest, source: str) -> str:
    """Return the SHA-256 of the lengths and checksums of the files of `source`."""
    from storage_formats.format.shard_table import read_shard_tables

    folders = (f"tokens/{source}/", f"checksums/{source}/")
    entries = [file for _, file in read_shard_tables(root, manifest.shard_tables) if file.path.startswith(folders)]
    files = [(file.path, file.bytes, file.crc32c) for file in entries]
    return hashlib.sha256(repr(files).encode()).hexdigest()


def open_converter() -> Worker:
    """Return a worker that converts one shard per call."""
    return _convert_shard


def _check_names(config: QuantizeConfig, available: tuple[str, ...]) -> None:
    """Raise UsageError if the precisions to add and to drop are invalid."""
    from storage_formats.codecs import codec

    for name in (*config.to, *config.drop, *filter(None, [config.source])):
        codec(name)
    if both := sorted({*config.to} & {*config.drop}):
        raise UsageError(
            f"{', '.join(both)} cannot be both added and dropped; name each precision once", parameter="drop"
        )
    if config.drop and not set(available) - set(config.drop):
        raise UsageError(
            f"dropping {', '.join(config.drop)} would leave {config.root} without tokens; keep at least one precision",
            parameter="drop",
        )


def _convert(conversion: _Conversion, engine: Engine, on_event: OnEvent, should_stop: ShouldStop) -> Manifest:
    """Convert the shards that earlier runs did not finish, and commit the new precisions. Return the new manifest."""
    from storage_formats.format.receipts import read_receipts
    from storage_formats.writing.begin import clear_staging
    from storage_formats.writing.conversion import add_precisions

    spec = conversion.spec
    shards = list(spec.shard_numbers())
    receipts = read_receipts(Layout(conversion.root), shards, conversion.plan)
    _check_disk(conversion, len(shards) - len(receipts))
    clear_staging(conversion.root)
    on_event(PlanReady(spec.used_rows, len(shards), len(receipts)))
    job = ShardJob(
        activity="converting",
        shards=shards,
        rows=spec.used_rows,
        make_worker=on_shared_directory(conversion.root, open_converter),
        make_task=functools.partial(_conversion_task, conversion),
        state_of_report=_state_of_report,
        state_of_receipt=_state_of_receipt,
    )
    run = run_shards(job, receipts, engine, on_event, should_stop)
    try:
        return add_precisions(conversion.root, conversion.targets, run.receipts, source=conversion.source)
    except OSError as error:
        root, reason = conversion.root, describe_error(error)
        raise JobStopped(f"cannot write {root}: {reason}; finished shards are kept") from error


def _check_disk(conversion: _Conversion, shards: int) -> None:
    """Raise UsageError if the disk has no room for `shards` shards of every target."""
    spec = conversion.spec
    record_sizes = [_record_bytes(spec, name) for name in conversion.targets]
    need = sum(shards * padded_shard_bytes(spec.shard_size, spec.shard_size, size)[1] for size in record_sizes)
    free = free_disk(conversion.root)
    if need > free:
        raise UsageError(
            f"converting {counted(shards, 'shard')} to {', '.join(conversion.targets)} needs up to {need} "
            f"bytes of disk, but only {free} are free at {conversion.root}; free some space, or convert "
            "to fewer precisions at a time",
            parameter="to",
        )


def _record_bytes(spec: IndexSpec, name: str) -> int:
    from storage_formats.codecs import codec

    return codec(name, spec.block_shape).record_bytes


def _conversion_task(conversion: _Conversion, shard: int) -> ConversionTask:
    from storage_formats.format.index_files import remote_files
    from storage_formats.writing.conversion import ConversionTask

    root, remote = conversion.root.absolute(), remote_files(conversion.root)
    url = None if remote is None else remote.folder.url
    return ConversionTask(
        str(root), shard, conversion.spec, conversion.source, conversion.targets, conversion.plan, url
    )


def _state_of_report(report: tuple[int, int]) -> tuple[int, ShardState]:
    shard, done = report
    return shard, ShardState(done)


def _state_of_receipt(receipt: ShardReceipt) -> ShardState:
    return ShardState(receipt.rows)


def _convert_shard(
    task: ConversionTask, on_progress: Callable[[Any], None], should_stop: Callable[[], bool]
) -> ShardReceipt:
    from storage_formats.writing.conversion import ConversionInterrupted, convert_shard

    try:
        return convert_shard(task, lambda done: on_progress((task.shard, done)), should_stop)
    except ConversionInterrupted as error:
        raise TaskInterrupted from error
