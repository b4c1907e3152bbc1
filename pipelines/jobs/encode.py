"""Encoding of new rows, with one task per shard."""

from __future__ import annotations

import functools
import itertools
import math
import os
import queue
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from edje_index.progress import ShardProgress
from pipelines.engines.base import (
    count_metrics,
    machine_gpus,
    open_engine,
)
from pipelines.environment import cuda_devices
from pipelines.jobs.changing import (
    PROCESSORS_MEMBER,
    FailedInputsError,
    ShardWork,
    processors,
)
from pipelines.jobs.plan import (
    SHARDS_PER_GPU,
    BuildSettings,
    Plan,
    model_record,
)
from pipelines.jobs.resources import Execution
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage
from pipelines.progress.wording import by_reason, counted
from storage_formats.change import Change, IndexChange
from storage_formats.format.journal import how_to_discard
from storage_formats.format.layout import Layout
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import FAILED, read_staged_rows
from storage_formats.threads import usable_cpus

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from edje_index.indexing.shard_encoding import ShardTask
    from edje_index.inputs.helpers import Helpers

DEFAULT_SHARE = 0.01
ALWAYS_ALLOWED = 20
"""Number of inputs that may fail by default in a collection of any size. In a small
collection, `DEFAULT_SHARE` alone would allow hardly any damaged file.
"""

UNDECODED = frozenset({"unsupported-image", "unsupported-video"})
"""Reasons of failed inputs that do not count towards the limit of failures. The file
may be sound, but this installation cannot decode its format.
"""

RAW_SUFFIXES = frozenset(
    [
        ".3fr",
        ".arw",
        ".cr2",
        ".cr3",
        ".dng",
        ".nef",
        ".nrw",
        ".orf",
        ".pef",
        ".raf",
        ".raw",
        ".rw2",
        ".srw",
    ]
)
"""Suffixes of camera raw files. The sources ignore these files."""

_NAMED_FAILURES = 3
_MAX_HELPERS = 32
# By default, no helper processes are started for at most this number of rows.
_FEW_ROWS = 64


def encoding(
    change: Change,
    plan: Plan,
    execution: Execution,
    on_event: OnEvent,
    *,
    needs_one: bool = True,
) -> ShardWork:
    """Return the work that encodes the rows of `plan`.

    The work ends with FailedInputsError if too many inputs fail. Inputs of formats that
    this installation does not decode do not count as failed. With `needs_one`, the work
    also ends with FailedInputsError if no input can be indexed. A change of a finished
    index is then abandoned.

    Args:
        execution: the result of `choose_workers`.
        needs_one: True to raise an error if no input can be indexed.
    """
    from edje_index.indexing.kept_batches import kept_rows
    from edje_index.indexing.shard_encoding import ShardTask

    layout = change.layout
    settings = plan.settings
    allowed = max(ALWAYS_ALLOWED, math.floor(DEFAULT_SHARE * plan.rows))
    limit = f"the {allowed:,} that may fail by default"
    if execution.max_failed is not None:
        # Add 1e-6 before rounding down, because 0.29 * 100 is 28.999999999999996.
        allowed = math.floor(execution.max_failed * plan.rows + 1e-6)
        limit = f"the share of {execution.max_failed:g} that may fail"
    failed = Counter[str]()

    def check(receipts: Sequence[ShardReceipt]) -> None:
        failed.update(receipts[-1].failed)
        number = sum(failed[reason] for reason in failed.keys() - UNDECODED)
        is_last = len(receipts) == len(plan.shards)
        if is_last and number and plan.duplicates:
            number += _failed_duplicates(layout, receipts)
        if number > allowed:
            done = sum(each.rows for each in receipts)
            so_far = "" if is_last else " so far"
            raise FailedInputsError(
                f"{number:,} of {counted(done, 'input')} failed{so_far}, more than"
                f" {limit} ({by_reason(failed)}). The first are"
                f" {_first_failures(layout, receipts)}. {len(receipts):,} of"
                f" {counted(len(plan.shards), 'shard')} are finished and kept; raise"
                " the share to index the others",
                parameter="max_failed",
            )
        if not is_last:
            return
        before = {}
        if isinstance(change, IndexChange):
            before = change.index.manifest.settings
        several = processors(before, receipts).get(PROCESSORS_MEMBER, ())
        if len(several) > 1 and several != before.get(PROCESSORS_MEMBER):
            text = f"the last bits of the tokens differ between {' and '.join(several)}"
            on_event(StatusMessage(text, is_warning=True))
        if undecoded := _undecoded(layout, receipts, plan.ignored):
            text = (
                f"{counted(undecoded.total(), 'file')} in a format that this"
                f" installation does not decode: {by_reason(undecoded)}"
            )
            on_event(StatusMessage(text, is_warning=True))
        if needs_one and not any(receipt.indexed for receipt in receipts):
            if isinstance(change, IndexChange):
                change.abandon()
            raise FailedInputsError(
                f"none of the {counted(failed.total(), 'input')} could be indexed"
                f" ({by_reason(failed)}). The first are"
                f" {_first_failures(layout, receipts)}; correct"
                f" {', '.join(settings.sources)}, and run the command again"
            )

    engine = execution.engine
    workers = execution.workers
    device = settings.device
    cpus = settings.threads
    per_gpu = SHARDS_PER_GPU
    helpers = execution.helpers
    if helpers is None and plan.rows <= _FEW_ROWS:
        helpers = 0
    if settings.is_cuda:
        # Reserve one CPU in Ray. The worker computes its number of helpers from the
        # CPUs of its machine, see `ShardWorker`.
        cpus = 1
        if engine == "inline":
            engine = "threads"
            workers = SHARDS_PER_GPU
        elif engine == "ray":
            # A Ray worker sees only the GPU that Ray assigns to it, so the device needs
            # no number.
            device = "cuda"
            if execution.address is None and workers is not None:
                per_gpu = max(per_gpu, math.ceil(workers / cuda_devices()))
    return ShardWork(
        "indexing",
        plan.shards,
        plan.rows,
        plan.identity,
        make_task=lambda shard, fingerprint: ShardTask(
            root=str(layout.location),
            shard=shard,
            spec=plan.spec,
            plan=fingerprint,
            batch_size=settings.batch_size,
            decoding=settings.decoding,
            columns=plan.columns,
        ),
        make_worker=functools.partial(
            ShardWorker,
            str(plan.model["bundle"]),
            settings,
            device,
            helpers,
            workers if engine == "threads" and workers else 1,
            per_gpu,
        ),
        engine=open_engine(
            engine,
            workers,
            cpus=cpus,
            gpus=1 / per_gpu if settings.is_cuda else 0.0,
            address=execution.address,
            lock=None if layout.remote else layout.lock,
        ),
        shows_failed=True,
        described={
            "workers": execution.workers,
            "duplicates": plan.duplicates,
            "ignored": plan.ignored,
        },
        check=check,
        kept_rows=lambda: kept_rows(layout),
    )


def earlier_plan(
    change: Change,
    info: BundleInfo,
    on_event: OnEvent,
    is_wanted: Callable[[Plan], bool] = lambda plan: True,
) -> Plan | None:
    """Return the stored plan of an earlier run of `change`, to be resumed; None if this
    run must make a new plan.

    The stored plan is removed if it has finished shards but none of their inputs was
    indexed, or if it has no finished shard and `is_wanted` returns False for it.

    Args:
        info: the bundle with which this run encodes.
        is_wanted: returns True for a plan that fits the request of this run.
    """
    if change.plan is None:
        return None
    plan = Plan.parse(change.plan)
    receipts = change.receipts(plan.shards, plan.fingerprint)
    is_useless = not any(receipt.indexed for receipt in receipts.values())
    if is_useless and (receipts or not is_wanted(plan)):
        change.start_again()
        return None
    planned = change.layout.journal.stat().st_mtime
    for source in plan.settings.sources:
        if os.path.isfile(source) and os.path.getmtime(source) > planned:
            text = (
                f"{source} has changed since this command began; the command goes on"
                " with the inputs that it listed then. Update the index when it is"
                f" finished, or {how_to_discard(change.layout)[0]} to start over"
            )
            on_event(StatusMessage(text, is_warning=True))
    if plan.model["fingerprint"] == info.encoder_fingerprint:
        # The bundle may be at another path than in the earlier run.
        plan = replace(plan, model=model_record(info))
    return plan


def _undecoded(
    layout: Layout,
    receipts: Sequence[ShardReceipt],
    ignored: Mapping[str, int],
) -> Counter[str]:
    """Return the number of files in formats that this installation does not decode, by
    format.

    These files are the failed inputs with a reason in `UNDECODED`, and the camera raw
    files that `ignored` counts by suffix.
    """
    formats = Counter(
        {
            f"camera raw {suffix} (export the photos as JPEG)": ignored[suffix]
            for suffix in RAW_SUFFIXES & ignored.keys()
        }
    )
    for receipt in receipts:
        if not UNDECODED.isdisjoint(receipt.failed):
            rows = read_staged_rows(layout, receipt.shard, ["reason", "detail"])
            formats.update(
                row["detail"] for row in rows.to_pylist() if row["reason"] in UNDECODED
            )
    return formats


def _failed_duplicates(layout: Layout, receipts: Sequence[ShardReceipt]) -> int:
    """Return the number of duplicates whose original has failed. Inputs of formats that
    are not decoded do not count as failed.
    """
    failed: set[int] = set()
    duplicates = 0
    # In row order, an original comes before its duplicates.
    for shard in sorted(receipt.shard for receipt in receipts):
        columns = ["row_id", "status", "reason", "duplicate_of"]
        rows = read_staged_rows(layout, shard, columns)
        lost = (pc.field("status") == FAILED) & ~pc.field("reason").isin(UNDECODED)
        failed.update(rows.filter(lost)["row_id"].to_pylist())
        duplicates += sum(row in failed for row in rows["duplicate_of"].to_pylist())
    return duplicates


def _first_failures(layout: Layout, receipts: Sequence[ShardReceipt]) -> str:
    """Return a text with the uris and reasons of the first failed inputs."""
    shards = sorted(receipt.shard for receipt in receipts if receipt.failed)
    tables = (
        read_staged_rows(layout, shard, ["uri", "status", "reason"]).to_pylist()
        for shard in shards
    )
    failed = (
        f"{row['uri']} ({row['reason']})"
        for rows in tables
        for row in rows
        if row["status"] == FAILED
    )
    return ", ".join(itertools.islice(failed, _NAMED_FAILURES))


class ShardWorker:
    """Worker that loads the encoder and encodes one shard per call. Thread-safe.

    Args:
        bundle: directory of the model bundle.
        settings: settings of the build.
        device: device of the encoder.
        helpers: number of helper processes that prepare inputs for a shard. 0 prepares
            them in threads of this process. None derives the number from the CPUs: the
            number of threads of a model on a CPU; for a GPU, the share of this worker
            without the thread that feeds the GPU.
        at_once: number of shards that this worker encodes at the same time.
        per_gpu: number of shards that are encoded at the same time on one GPU, by all
            its workers together. The CPUs of the machine are divided evenly among the
            shards on all its GPUs.
    """

    def __init__(
        self,
        bundle: str,
        settings: BuildSettings,
        device: str,
        helpers: int | None = None,
        at_once: int = 1,
        per_gpu: int = SHARDS_PER_GPU,
    ) -> None:
        from edje_index.bundles.info import read_bundle_info
        from edje_index.indexing.image_encoder import ImageEncoder, read_preprocessor
        from edje_index.indexing.shard_encoding import batches_in_memory
        from edje_index.inputs.helpers import Helpers
        from edje_index.inputs.preparation import Preparation

        self._threads = settings.threads
        if settings.is_cuda:
            share = usable_cpus() // (per_gpu * machine_gpus())
            self._threads = min(max(1, share - 1), _MAX_HELPERS)
        if helpers is None:
            helpers = self._threads
        self._pools: queue.SimpleQueue[Helpers | None] = queue.SimpleQueue()
        preprocess = read_preprocessor(read_bundle_info(bundle))
        batches = batches_in_memory(settings.batch_size)
        inputs = settings.decoding.inputs_per_batch(settings.batch_size)
        # The helpers start while the encoder is loaded.
        pools = [
            Helpers(
                helpers, Preparation(settings.decoding, preprocess), batches * inputs
            )
            if helpers
            else None
            for _ in range(at_once)
        ]
        self._encoder = ImageEncoder.open(
            bundle, device=device, threads=settings.threads, dtype=settings.dtype
        )
        for pool in pools:
            if pool is not None:
                self._encoder.pin(pool.pixels)
            self._pools.put(pool)

    def __call__(
        self,
        task: ShardTask,
        on_progress: Callable[[ShardProgress], None],
        should_stop: ShouldStop,
    ) -> ShardReceipt:
        from edje_index.indexing.shard_encoding import encode_shard

        task = replace(task, decode_threads=self._threads)
        pool = self._pools.get()
        try:
            receipt = encode_shard(task, self._encoder, on_progress, should_stop, pool)
        finally:
            self._pools.put(pool)
        count_metrics(
            {
                "images": receipt.indexed,
                "failed_images": sum(receipt.failed.values()),
                "written_bytes": sum(file.bytes for file in receipt.files),
                **{f"{name}_seconds": each for name, each in receipt.seconds.items()},
            }
        )
        return receipt

    def close(self) -> None:
        """End the helper processes."""
        while not self._pools.empty():
            pool = self._pools.get()
            if pool is not None:
                self._encoder.unpin(pool.pixels)
                pool.close()
