"""The quantize job: further precisions of a finished index, on the engines of the build job."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engines.base import Engine, TaskFailure, TaskInterrupted, Worker, describe_error
from pipelines.jobs.lock import locked_index
from pipelines.planning.machine import free_disk
from pipelines.progress.events import OnEvent, PlanReady
from pipelines.progress.meter import ShardMeter, ShardState
from pipelines.progress.stopping import JobStopped, ShouldStop
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout, padded_shard_bytes

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.receipts import ShardReceipt
    from storage_formats.writing.conversion import ConversionTask


@dataclass(frozen=True)
class QuantizeResult:
    """What a conversion came to.

    Attributes:
        source: precision that was read; None where nothing had to be done.
        added, dropped: precisions.
        precisions: what the index holds now.
        rows, shards: of the index.
        bytes_per_image: length of a record by precision.
        seconds: wall time of this run.
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
class QuantizeConfig:
    """A request.

    Attributes:
        root: the index.
        to: precisions that it shall hold afterwards, beside what it holds.
        drop: precisions to remove then.
        source: precision to convert from; None takes the most faithful.
    """

    root: Path
    to: tuple[str, ...]
    drop: tuple[str, ...] = ()
    source: str | None = None


def quantize_index(
    config: QuantizeConfig, engine: Engine, on_event: OnEvent, should_stop: ShouldStop = lambda: False
) -> QuantizeResult:
    """Add the precisions that are missing, then drop those that are to go; resumes what was begun.

    Raises:
        UsageError: no index, an unknown precision, one both to add and to drop, a source that it does not hold, too
            little disk.
        JobStopped: stopped or failed before the end; running it again resumes it.
    """
    from storage_formats.format.manifest import Manifest
    from storage_formats.writing.conversion import drop_precision, remove_leftovers

    started = time.monotonic()
    before = Manifest.load(config.root)
    with locked_index(config.root):
        manifest = Manifest.load(config.root)
        missing = tuple(name for name in dict.fromkeys(config.to) if name not in manifest.spec.precisions)
        _check_names(config, (*manifest.spec.precisions, *missing))
        source = precision_to_read(config.root, manifest.spec, config.source) if missing else None
        if source is not None:
            manifest = _Conversion(config.root, manifest.spec, source, missing, on_event).run(engine, should_stop)
        for name in config.drop:
            if name in manifest.spec.precisions:
                manifest = drop_precision(config.root, name)
        remove_leftovers(config.root)
    dropped = tuple(name for name in before.spec.precisions if name not in manifest.spec.precisions)
    return _result(manifest, source, missing, dropped, time.monotonic() - started)


def _result(
    manifest: Manifest, source: str | None, added: tuple[str, ...], dropped: tuple[str, ...], seconds: float
) -> QuantizeResult:
    return QuantizeResult(
        source=source,
        added=added,
        dropped=dropped,
        precisions=manifest.spec.precisions,
        rows=manifest.spec.rows,
        shards=manifest.spec.shards,
        bytes_per_image={name: _record_bytes(manifest.spec, name) for name in manifest.spec.precisions},
        seconds=seconds,
    )


def _check_names(config: QuantizeConfig, held: tuple[str, ...]) -> None:
    from storage_formats.codecs import codec

    for name in (*config.to, *config.drop, *filter(None, [config.source])):
        codec(name)
    if both := sorted({*config.to} & {*config.drop}):
        raise UsageError(f"{', '.join(both)}: both to add and to drop; say one of them")
    if config.drop and not set(held) - set(config.drop):
        raise UsageError(f"dropping {', '.join(config.drop)} would leave {config.root} without tokens")


def _record_bytes(spec: IndexSpec, name: str) -> int:
    from storage_formats.codecs import codec

    return codec(name, spec.block_shape).record_bytes


def precision_to_read(root: Path, spec: IndexSpec, wanted: str | None) -> str:
    """The precision to read: `wanted`, or where it is None the most faithful.

    UsageError where the index does not hold it.
    """
    from storage_formats.codecs import precisions

    if wanted is None:
        return min(spec.precisions, key=precisions().index)
    if wanted not in spec.precisions:
        raise UsageError(f"{root} does not hold '{wanted}' to convert from; it holds: {', '.join(spec.precisions)}")
    return wanted


class _Conversion:
    """One run over the shards of an index."""

    def __init__(self, root: Path, spec: IndexSpec, source: str, targets: tuple[str, ...], on_event: OnEvent) -> None:
        self._root = root
        self._layout = Layout(root)
        self._spec = spec
        self._source = source
        self._targets = targets
        self._on_event = on_event
        self._meter = ShardMeter("converting", spec.rows, spec.shards)
        self._receipts: dict[int, ShardReceipt] = {}
        described = f"convert {spec} {source} {targets}"
        self._plan = hashlib.sha256(described.encode()).hexdigest()

    def run(self, engine: Engine, should_stop: ShouldStop) -> Manifest:
        """Convert what is missing and publish."""
        from storage_formats.writing.conversion import add_precisions
        from storage_formats.writing.publish import clear_staging

        self._find_receipts()
        self._check_disk()
        clear_staging(self._root)
        self._on_event(PlanReady(self._spec.rows, self._spec.shards, len(self._receipts)))
        try:
            self._run_shards(engine, should_stop)
            if len(self._receipts) < self._spec.shards:
                raise JobStopped(f"stopped; {self._standing()}")
            return add_precisions(self._root, self._targets, list(self._receipts.values()))
        except OSError as error:
            raise JobStopped(f"{describe_error(error)} ({self._standing()})") from error

    def _standing(self) -> str:
        return f"{len(self._receipts)} of {self._spec.shards} shards are finished"

    def _check_disk(self) -> None:
        left = self._spec.shards - len(self._receipts)
        need = sum(
            left * padded_shard_bytes(self._spec.shard_size, self._spec.shard_size, size)[1]
            for size in (_record_bytes(self._spec, name) for name in self._targets)
        )
        free = free_disk(self._root)
        if need > free:
            raise UsageError(
                f"{', '.join(self._targets)} of {left} shards need up to {need} bytes of disk, "
                f"{free} are free at {self._root}; free some, or convert to fewer precisions at a time"
            )

    def _find_receipts(self) -> None:
        from storage_formats.format.receipts import read_receipt

        for shard in range(self._spec.shards):
            if (receipt := read_receipt(self._layout, shard, self._plan)) is not None:
                self._receipts[shard] = receipt
                self._meter.finish(shard, ShardState(receipt.rows))

    def _run_shards(self, engine: Engine, should_stop: ShouldStop) -> None:
        from storage_formats.writing.conversion import ConversionTask

        spec, root = self._spec, str(self._root.absolute())
        tasks = [
            ConversionTask(root, shard, spec, self._source, self._targets, self._plan)
            for shard in range(spec.shards)
            if shard not in self._receipts
        ]
        if not tasks:
            return
        with closing(
            engine.run(open_converter, tasks, on_progress=self._progress, should_stop=should_stop)
        ) as outcomes:
            for outcome in outcomes:
                if isinstance(outcome, TaskFailure):
                    raise JobStopped(f"shard {outcome.task.shard}: {outcome.message} ({self._standing()})")
                self._receipts[outcome.result.shard] = outcome.result
                self._on_event(self._meter.finish(outcome.result.shard, ShardState(outcome.result.rows)))

    def _progress(self, report: tuple[int, int]) -> None:
        shard, done = report
        self._on_event(self._meter.update(shard, ShardState(done)))


def open_converter() -> Worker:
    """A worker of `pipelines.engines` that converts one shard after another."""
    return _convert


def _convert(task: ConversionTask, on_progress: Callable[[Any], None], should_stop: Callable[[], bool]) -> ShardReceipt:
    from storage_formats.writing.conversion import ConversionInterrupted, convert_shard

    try:
        return convert_shard(task, lambda done: on_progress((task.shard, done)), should_stop)
    except ConversionInterrupted as error:
        raise TaskInterrupted from error
