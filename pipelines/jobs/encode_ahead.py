"""Encodes the first shards of a build while its sources are still being listed."""

from __future__ import annotations

import contextlib
import functools
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pipelines.engines.base import EngineUnavailableError, Notice, TaskFailure, describe_error
from pipelines.jobs.encode_shards import decode_threads, encoding_task, open_workers
from pipelines.planning.config import BuildConfig
from pipelines.planning.inputs import OnShardListed
from pipelines.planning.machine import free_disk
from pipelines.planning.prepare import PreparedBuild
from pipelines.planning.resources import disk_need
from pipelines.progress.events import Event, OnEvent, Progress, StatusMessage
from pipelines.progress.stopping import ShouldStop
from pipelines.progress.wording import human_bytes
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from edje_index.images.inputs import InputRef
    from edje_index.indexing.shard_encoding import StageProgress
    from edje_index.indexing.shard_task import ShardTask

PATIENCE_SECONDS = 10.0
"""Workers start once a listing takes longer than this. Their second start, after the listing, takes about as long."""

MAX_SHARD_ROWS = 1 << 13
"""Larger shards are encoded after the listing, because a task holds the inputs of its shard."""

_WAITING_ROWS = 1 << 16  # at most; the inputs of the waiting shards are in memory
_POLL_SECONDS = 0.5


class EncodingAhead:
    """Runs an engine in a thread while the sources of a build are listed.

    If an exception ends the `with` block of this object, a message says what is kept for the next run.

    Args:
        config: request for the build.
        on_event: callback that receives the events. The thread of the engine calls it too, because the listing may wait
            for its next input. Only one thread calls it at a time.
        should_stop: also called from the thread of the engine, which stops once `should_stop()` returns True.
    """

    def __init__(self, config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop) -> None:
        self._config, self._on_event, self._should_stop = config, on_event, should_stop
        self._listed = Layout(Layout(config.out).listed)
        self._earlier_shards: set[int] = set()  # with a receipt
        self._is_listed, self._ended = threading.Event(), threading.Event()
        self._waiting: deque[tuple[int, Sequence[InputRef]]] = deque()
        self._events = threading.Lock()
        self._progress: Progress | None = None  # of the listing
        self._error: BaseException | None = None  # of the engine or of a callback in its thread
        self._encoded: dict[int, int] = {}  # number of rows by shard

    @property
    def rows(self) -> int:
        """Number of rows that were encoded during the listing, in this run or in an earlier run."""
        return sum(self._encoded.copy().values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from edje_index.indexing.listed_shards import has_listed_rows, listed_bytes

        if error is not None and has_listed_rows(self._config.out):
            rows = f"the rows encoded during the listing ({human_bytes(listed_bytes(self._config.out))})"
            self._on_event(StatusMessage(f"{rows} are kept in {self._listed.root} for the next run"))

    def on_event(self, event: Event) -> None:
        """Pass `event` on. Events about the listing get the number of rows that are encoded already.

        Raises:
            UsageError, EngineUnavailableError: the engine cannot run, also not after the listing.
        """
        if self._error is not None:
            raise self._error
        with self._events:
            if isinstance(event, Progress):
                self._progress = event = replace(event, encoded=self.rows)
            self._on_event(event)

    @contextlib.contextmanager
    def started(self, build: PreparedBuild) -> Iterator[OnShardListed | None]:
        """Encode during the `with` block. At its end, the workers save what they have encoded.

        Args:
            build: build with the model and the settings of the plan. Its inputs are not used.

        Yields:
            A function that must be called with every full shard of the list. None if no shard is to be encoded.
        """
        from edje_index.indexing.listed_shards import listed_shards

        # An image that ends its process must not end the listing too, so the inline engine encodes after the listing.
        if self._config.engine == "inline" or build.plan.settings.shard_size > MAX_SHARD_ROWS:
            yield None
            return
        self._earlier_shards = listed_shards(self._config.out)
        threading.Thread(target=self._run, args=(build,), name="edje-encode-ahead").start()
        try:
            yield functools.partial(self._add, build)
        finally:
            self._is_listed.set()
            try:
                self._ended.wait()  # `Thread.join` of Python 3.11 would count the thread as ended after an interrupt
            finally:
                self._ended.wait()  # also after a second Ctrl-C, because the build keeps the lock of the index so long

    def _show(self, event: Event) -> None:
        """Pass an event of the engine on. An error of the callback is raised in the thread of the caller."""
        if self._error is not None:
            return
        try:
            with self._events:
                self._on_event(event)
        except BaseException as error:  # sys.exit too
            self._error = error

    def _show_progress(self) -> None:
        if self._progress is not None:
            self._show(replace(self._progress, encoded=self.rows))

    def _add(self, build: PreparedBuild, shard: int, refs: Sequence[InputRef]) -> None:
        from storage_formats.format.receipts import read_receipt

        if shard in self._earlier_shards:
            task = self._task(build, shard, refs)
            if read_receipt(self._listed, shard, task.plan) is not None:
                self._encoded[shard] = len(refs)
                return
        if len(self._waiting) * len(refs) < _WAITING_ROWS:
            self._waiting.append((shard, refs))

    def _run(self, build: PreparedBuild) -> None:
        try:
            self._is_listed.wait(PATIENCE_SECONDS)
            while not self._waiting and not self._is_over():  # the engine starts when there is something to encode
                self._is_listed.wait(_POLL_SECONDS)
            if not self._is_over():
                self._encode(build)
        except (UsageError, EngineUnavailableError) as error:
            self._error = error
        except Exception as error:
            ended = f"the encoding during the listing ended: {describe_error(error)}; it goes on after the listing"
            self._show(StatusMessage(ended, is_warning=True))
        finally:
            self._ended.set()

    def _is_over(self) -> bool:
        return self._is_listed.is_set() or self._should_stop()

    def _encode(self, build: PreparedBuild) -> None:
        from edje_index.indexing.attempts import forget_attempt
        from storage_formats.writing.begin import clear_staging

        clear_staging(self._listed.root)
        shutil.rmtree(self._listed.attempt(0).parent, ignore_errors=True)  # they may be about other inputs
        make_worker, engine = open_workers(self._config, build)
        outcomes = engine.run(make_worker, self._tasks(build), on_progress=self._count, should_stop=self._is_over)
        with contextlib.closing(outcomes):
            for outcome in outcomes:
                if isinstance(outcome, TaskFailure):
                    raise EdjeError(f"shard {outcome.task.shard}: {outcome.message}")
                if isinstance(outcome, Notice):
                    self._show(StatusMessage(outcome.message, outcome.is_warning))
                    if outcome.repeated is not None:
                        forget_attempt(self._listed, outcome.repeated.shard)
                else:
                    self._encoded[outcome.task.shard] = outcome.result.rows
                    self._show_progress()

    def _count(self, report: StageProgress) -> None:
        self._encoded[report.shard] = report.done
        self._show_progress()

    def _tasks(self, build: PreparedBuild) -> Iterator[ShardTask | None]:
        """Yield the tasks of listed shards, and None while there is none. Use at most half of the free disk space."""
        shard_bytes = disk_need(replace(build.plan.spec, rows=build.plan.settings.shard_size)).total
        room = free_disk(self._config.out) // 2
        while True:
            if self._waiting and room >= shard_bytes:
                room -= shard_bytes
                task = self._task(build, *self._waiting.popleft())
                self._remove_receipt(task.shard)
                yield task
            else:
                yield None

    def _remove_receipt(self, shard: int) -> None:
        """Remove the receipt of an earlier run, which must not vouch for new files."""
        from storage_formats.atomic import fsync_parent

        if shard in self._earlier_shards:
            self._listed.receipt(shard).unlink(missing_ok=True)
            fsync_parent(self._listed.receipt(shard))

    def _task(self, build: PreparedBuild, shard: int, refs: Sequence[InputRef]) -> ShardTask:
        """Return the task that encodes a full shard into `build/listed/`."""
        spec = replace(build.plan.spec, rows=(shard + 1) * len(refs))
        threads = decode_threads(build.plan.settings, build.workers)
        task = encoding_task(replace(build.plan, spec=spec), shard, threads)
        root = str(self._listed.root.absolute())
        return replace(task, root=root, plan=task.listed_fingerprint(refs), inputs=tuple(refs))
