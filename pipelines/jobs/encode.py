"""Encodes new rows: one task per shard, on an engine."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edje_index.progress import ShardProgress
from pipelines.engines.base import Worker, WorkerFactory, open_engine
from pipelines.engines.ray_engine import worker_machine
from pipelines.jobs.plan import Plan
from pipelines.jobs.shard_run import run_shards
from pipelines.progress.events import OnEvent, PlanReady, ShouldStop
from pipelines.progress.wording import counted
from storage_formats.change import Change
from storage_formats.cpus import usable_cpus
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import FAILED, read_shard_rows

if TYPE_CHECKING:
    from edje_index.indexing.shard_encoding import ShardTask

DEFAULT_SHARE = 0.01
ALWAYS_ALLOWED = 20
"""By default, this many inputs may always fail, because small collections have damaged files, too."""

_NAMED_FAILURES = 3
_MAX_DECODE_THREADS = 16


def encode_rows(
    change: Change,
    plan: Plan,
    engine: str,
    workers: int | None,
    address: str | None,
    max_failed: float | None,
    on_event: OnEvent,
    should_stop: ShouldStop,
    *,
    needs_one: bool = True,
) -> tuple[list[ShardReceipt], float]:
    """Encode the shards of `plan` that earlier runs of `change` did not finish.

    `pipelines.build_index` describes the other arguments, but `workers` is the result of `check_workers`. `needs_one`
    says whether it is an error if no input can be indexed.

    Returns:
        The receipts of all shards, in the order of the shards, and the rows that this run encoded per second.

    Raises:
        UsageError, EngineUnavailableError: the engine cannot run with the requested workers or devices.
        EdjeError: too many inputs failed, or none could be indexed. In the second case, a change of a finished index
            is abandoned.
        JobStopped: `should_stop()` returned True, or a shard failed. Finished shards are kept.
        OSError: the index cannot be written.
    """
    layout, settings = change.layout, plan.settings
    earlier = change.receipts(plan.shards, plan.fingerprint)
    on_event(PlanReady(plan.rows, len(plan.shards), len(earlier), workers, plan.duplicates, plan.ignored))
    allowed = max(ALWAYS_ALLOWED, math.floor(DEFAULT_SHARE * plan.rows))
    limit = f"the {allowed:,} that may fail by default"
    if max_failed is not None:
        allowed = math.floor(max_failed * plan.rows + 1e-6)  # 0.29 * 100 is less than 29
        limit = f"the share of {max_failed:g} that may fail"
    started, failed = time.monotonic(), Counter[str]()
    receipts: list[ShardReceipt] = []
    # If the model runs on the CPU, it shares its threads with the decoding. Otherwise the workers share all CPUs.
    threads = settings.threads if settings.device == "cpu" else usable_cpus() // (workers or 1)
    threads = min(max(1, threads), _MAX_DECODE_THREADS)
    bundle = str(plan.model["bundle"])
    run = run_shards(
        "indexing",
        plan.shards,
        plan.rows,
        earlier,
        engine=open_engine(
            engine, workers, cpus=settings.threads, gpus=1 if settings.device == "cuda" else 0, address=address
        ),
        make_worker=on_shared_directory(
            layout.root, functools.partial(open_worker, bundle, settings.device, settings.threads, settings.dtype)
        ),
        make_task=lambda shard: encoding_task(layout.root, plan, shard, threads),
        on_event=on_event,
        should_stop=should_stop,
        shows_failed=True,
    )
    with contextlib.closing(run):
        for receipt in run:
            receipts.append(receipt)
            failed.update(receipt.failed)
            if failed.total() > allowed:
                done = sum(each.rows for each in receipts)
                so_far = "" if done == plan.rows else " so far"
                raise EdjeError(
                    f"{failed.total():,} of {counted(done, 'input')} failed{so_far}, more than {limit} "
                    f"({_by_reason(failed)}). The first are {_first_failures(layout, receipts)}. {len(receipts):,} of "
                    f"{counted(len(plan.shards), 'shard')} are finished and kept; raise the share to index the others",
                    parameter="max_failed",
                )
    if needs_one and not any(receipt.indexed for receipt in receipts):
        restart = f"remove {layout.root}, and run the command again"  # until then, `failures` lists them
        if change.index is not None:
            change.abandon()
            restart = "and run the command again"
        raise EdjeError(
            f"none of the {counted(failed.total(), 'input')} could be indexed ({_by_reason(failed)}). The first are "
            f"{_first_failures(layout, receipts)}; correct the sources, {restart}"
        )
    encoded = sum(receipt.rows for receipt in receipts if receipt.shard not in earlier)
    return sorted(receipts, key=lambda receipt: receipt.shard), encoded / (time.monotonic() - started)


def _by_reason(failed: Counter[str]) -> str:
    return ", ".join(f"{reason} {number:,}" for reason, number in sorted(failed.items()))


def _first_failures(layout: Layout, receipts: list[ShardReceipt]) -> str:
    """Return a text with the uris and reasons of the first failed inputs."""
    shards = sorted(receipt.shard for receipt in receipts if receipt.failed)
    tables = (read_shard_rows(layout, shard, ["uri", "status", "reason"]).to_pylist() for shard in shards)
    failed = (f"{row['uri']} ({row['reason']})" for rows in tables for row in rows if row["status"] == FAILED)
    return ", ".join(itertools.islice(failed, _NAMED_FAILURES))


def encoding_task(root: Path, plan: Plan, shard: int, threads: int = 1) -> ShardTask:
    """Return the task that encodes `shard`, with `threads` threads that decode images."""
    from edje_index.images.inputs import DecodeSettings
    from edje_index.indexing.shard_encoding import ShardTask

    return ShardTask(
        root=str(root.absolute()),
        shard=shard,
        spec=plan.spec,
        plan=plan.fingerprint,
        batch_size=plan.settings.batch_size,
        decoding=DecodeSettings(**{each.name: getattr(plan.settings, each.name) for each in fields(DecodeSettings)}),
        decode_threads=threads,
        columns=plan.columns,
    )


@dataclass(frozen=True)
class EncodeWorker:
    """Worker of an engine. Each call encodes one shard."""

    encoder: Any

    def __call__(
        self, task: ShardTask, on_progress: Callable[[ShardProgress], None], should_stop: ShouldStop
    ) -> ShardReceipt:
        from edje_index.indexing.shard_encoding import encode_shard

        machine, alive = worker_machine()
        return encode_shard(task, self.encoder, on_progress, should_stop, machine=machine, alive=alive)


def open_worker(bundle: str, device: str, threads: int, dtype: str) -> Worker:
    """Load the encoder and return a worker that encodes shards."""
    from edje_index.indexing.image_encoder import ImageEncoder

    return EncodeWorker(ImageEncoder.open(bundle, device=device, threads=threads, dtype=dtype))


def on_shared_directory(root: Path, make_worker: WorkerFactory) -> WorkerFactory:
    """Return a worker factory that checks that its machine sees the index directory, before it calls `make_worker`.

    The calling process holds the lock of the index at `root`. The factory raises EdjeError if the worker sees another
    lock file, or none.
    """
    lock = Layout(root.absolute()).lock
    return functools.partial(_make_worker, lock, lock.read_bytes(), make_worker)


def _make_worker(lock: Path, holder: bytes, make_worker: WorkerFactory) -> Worker:
    try:
        is_shared = lock.read_bytes() == holder
    except (FileNotFoundError, NotADirectoryError):
        is_shared = False
    if not is_shared:
        raise EdjeError(
            f"the machine {socket.gethostname()} does not see the index directory {lock.parents[1]} of this job; put "
            "the index into a directory that all machines share under the same path"
        )
    return make_worker()
