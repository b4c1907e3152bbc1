"""Runs one task per shard on an engine, and encodes new rows in this way.

A shard is finished once its receipt is stored. A resumed job runs only shards without a
receipt.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING

from edje_index.progress import ShardProgress
from pipelines.engines.base import (
    Engine,
    EngineUnavailableError,
    Task,
    TaskFailedError,
    Worker,
    WorkerFactory,
    describe_error,
    open_engine,
    worker_machine,
)
from pipelines.jobs.plan import Plan
from pipelines.progress.events import (
    JobStopped,
    OnEvent,
    PlanReady,
    Progress,
    ShardMeter,
    ShouldStop,
)
from pipelines.progress.wording import counted
from storage_formats.change import Change
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import FAILED, read_shard_rows
from storage_formats.threads import usable_cpus

if TYPE_CHECKING:
    from edje_index.indexing.shard_encoding import ShardTask

DEFAULT_SHARE = 0.01
ALWAYS_ALLOWED = 20
"""By default, this many inputs may always fail, because small collections have
damaged files, too.
"""

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

    `pipelines.build_index` describes the other arguments, but `workers` is the result
    of `choose_workers`. `needs_one` says whether it is an error if no input can be
    indexed.

    Returns:
        The receipts of all shards, in the order of the shards, and the rows that this
        run encoded per second.

    Raises:
        UsageError, EngineUnavailableError: the engine cannot run with the requested
            workers or devices.
        EdjeError: too many inputs failed, or none could be indexed. In the second case,
            a change of a finished index is abandoned.
        JobStopped: `should_stop()` returned True, or a shard failed. Finished shards
            are kept.
    """
    from edje_index.indexing.shard_encoding import ShardTask

    layout = change.layout
    settings = plan.settings
    fingerprint = plan.fingerprint
    earlier = change.receipts(plan.shards, fingerprint)
    on_event(
        PlanReady(
            plan.rows,
            len(plan.shards),
            len(earlier),
            workers,
            plan.duplicates,
            plan.ignored,
        )
    )
    allowed = max(ALWAYS_ALLOWED, math.floor(DEFAULT_SHARE * plan.rows))
    limit = f"the {allowed:,} that may fail by default"
    if max_failed is not None:
        # 0.29 * 100 is less than 29
        allowed = math.floor(max_failed * plan.rows + 1e-6)
        limit = f"the share of {max_failed:g} that may fail"
    started = time.monotonic()
    failed = Counter[str]()
    receipts: list[ShardReceipt] = []
    # If the model runs on the CPU, it shares its threads with the decoding. Otherwise
    # the workers share all CPUs.
    threads = (
        settings.threads
        if settings.device == "cpu"
        else usable_cpus() // (workers or 1)
    )
    threads = min(max(1, threads), _MAX_DECODE_THREADS)
    bundle = str(plan.model["bundle"])
    run = run_shards(
        "indexing",
        plan.shards,
        plan.rows,
        earlier,
        engine=open_engine(
            engine,
            workers,
            cpus=settings.threads,
            gpus=1 if settings.device == "cuda" else 0,
            address=address,
            lock=layout.lock.absolute(),
        ),
        make_worker=functools.partial(
            open_worker, bundle, settings.device, settings.threads, settings.dtype
        ),
        make_task=lambda shard: ShardTask(
            root=str(layout.root.absolute()),
            shard=shard,
            spec=plan.spec,
            plan=fingerprint,
            batch_size=settings.batch_size,
            decoding=settings.decoding,
            decode_threads=threads,
            columns=plan.columns,
        ),
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
                    f"{failed.total():,} of {counted(done, 'input')} failed{so_far},"
                    f" more than {limit} ({_by_reason(failed)}). The first are"
                    f" {_first_failures(layout, receipts)}. {len(receipts):,} of"
                    f" {counted(len(plan.shards), 'shard')} are finished and kept;"
                    " raise the share to index the others",
                    parameter="max_failed",
                )
    if needs_one and not any(receipt.indexed for receipt in receipts):
        # until then, `failures` lists them
        restart = f"remove {layout.root}, and run the command again"
        if change.index is not None:
            change.abandon()
            restart = "and run the command again"
        raise EdjeError(
            f"none of the {counted(failed.total(), 'input')} could be indexed"
            f" ({_by_reason(failed)}). The first are"
            f" {_first_failures(layout, receipts)}; correct the sources, {restart}"
        )
    encoded = sum(receipt.rows for receipt in receipts if receipt.shard not in earlier)
    return sorted(receipts, key=lambda receipt: receipt.shard), encoded / (
        time.monotonic() - started
    )


def _by_reason(failed: Counter[str]) -> str:
    return ", ".join(
        f"{reason} {number:,}" for reason, number in sorted(failed.items())
    )


def _first_failures(layout: Layout, receipts: list[ShardReceipt]) -> str:
    """Return a text with the uris and reasons of the first failed inputs."""
    shards = sorted(receipt.shard for receipt in receipts if receipt.failed)
    tables = (
        read_shard_rows(layout, shard, ["uri", "status", "reason"]).to_pylist()
        for shard in shards
    )
    failed = (
        f"{row['uri']} ({row['reason']})"
        for rows in tables
        for row in rows
        if row["status"] == FAILED
    )
    return ", ".join(itertools.islice(failed, _NAMED_FAILURES))


def open_worker(bundle: str, device: str, threads: int, dtype: str) -> Worker:
    """Load the encoder and return a worker that encodes one shard per call."""
    from edje_index.indexing.image_encoder import ImageEncoder
    from edje_index.indexing.shard_encoding import encode_shard

    encoder = ImageEncoder.open(bundle, device=device, threads=threads, dtype=dtype)

    def encode(
        task: ShardTask,
        on_progress: Callable[[ShardProgress], None],
        should_stop: ShouldStop,
    ) -> ShardReceipt:
        machine, alive = worker_machine()
        return encode_shard(
            task, encoder, on_progress, should_stop, machine=machine, alive=alive
        )

    return encode


def run_shards(
    activity: str,
    shards: Sequence[int],
    rows: int,
    earlier: Mapping[int, ShardReceipt],
    *,
    engine: Engine,
    make_worker: WorkerFactory,
    make_task: Callable[[int], Task],
    on_event: OnEvent,
    should_stop: ShouldStop,
    shows_failed: bool = False,
) -> Generator[ShardReceipt, None, None]:
    """Run the tasks of the shards that have no receipt in `earlier`. Yield the receipts
    of all shards.

    Args:
        activity: name of the job in progress events, such as "indexing".
        shards: numbers of the shards, ascending.
        earlier: receipts of earlier runs, by shard. They are yielded first.
        make_worker: function that returns the worker of a process; see
            `pipelines.engines.base`. The worker reports `ShardProgress`.
        make_task: function that takes a shard number and returns the task.
        should_stop: called often; the job stops once it returns True.
        shows_failed: whether the failed rows of the receipts are part of the progress.

    Raises:
        JobStopped: `should_stop()` returned True, a shard failed, or the engine failed.
            Finished shards are kept.
        UsageError, EngineUnavailableError: the engine cannot run as requested.
    """
    meter = ShardMeter(activity, rows, len(shards))
    finished = finished_rows = 0

    def finish(receipt: ShardReceipt, seconds: Mapping[str, float]) -> Progress:
        nonlocal finished, finished_rows
        finished = finished + 1
        finished_rows = finished_rows + receipt.rows
        failed = sum(receipt.failed.values()) if shows_failed else 0
        return meter.update(
            ShardProgress(receipt.shard, receipt.rows, failed, seconds), is_final=True
        )

    try:
        for receipt in earlier.values():
            # times of earlier runs do not count
            finish(receipt, {})
            yield receipt
        missing = [shard for shard in shards if shard not in earlier]
        receipts = engine(
            make_worker,
            map(make_task, missing),
            on_progress=lambda report: on_event(meter.update(report)),
            on_event=on_event,
            should_stop=should_stop,
        )
        with contextlib.closing(receipts):
            for receipt in receipts if missing else ():
                on_event(finish(receipt, receipt.seconds))
                yield receipt
        # what follows may take long
        if finished < len(shards) or should_stop():
            raise JobStopped("stopped")
    except (UsageError, EngineUnavailableError):
        raise
    except (EdjeError, OSError) as error:
        # a second run may succeed
        of_shard = (
            f"shard {error.task.shard}: " if isinstance(error, TaskFailedError) else ""
        )
        raise JobStopped(
            f"{of_shard}{describe_error(error)}; {finished_rows:,} of"
            f" {counted(rows, 'row')} are kept, {finished:,} of"
            f" {counted(len(shards), 'shard')} are finished"
        ) from error
