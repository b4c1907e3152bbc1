"""Encodes the first shards of a build while its sources are still being listed.

The plan of a build needs the complete list of inputs. Until then, workers save the rows that they encode as pieces of
their shards (`storage_formats.writing.pieces`). When the plan is complete, the build takes these rows from the pieces.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pipelines.engines.base import Notice, TaskFailure, TaskInterrupted, Worker, describe_error
from pipelines.jobs.encode_shards import decode_threads, encoding_task, engine_of, worker_factory
from pipelines.planning.config import BuildConfig
from pipelines.planning.inputs import OnShardListed
from pipelines.planning.machine import free_disk
from pipelines.planning.prepare import PreparedBuild
from pipelines.progress.events import Event, OnEvent, Progress, StatusMessage
from pipelines.progress.stopping import ShouldStop
from pipelines.progress.wording import counted
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from edje_index.images.inputs import InputRef
    from edje_index.indexing.shard_encoding import ShardTask, StageProgress

PATIENCE_SECONDS = 20.0
"""Workers start once a listing takes longer than this. They start again after the listing, which takes some seconds."""

_WAITING_ROWS = 1 << 16  # at most, and at least one shard; the inputs of the waiting shards are in memory
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class AheadTask:
    """A shard to encode before the plan is complete, and its inputs."""

    shard: ShardTask
    refs: tuple[InputRef, ...]


@dataclass(frozen=True)
class AheadWorker:
    """Worker of an engine. Each call encodes one shard, saves its rows as pieces, and returns their number."""

    encoder: Any

    def __call__(self, task: AheadTask, on_report: Callable[[StageProgress], None], should_stop: ShouldStop) -> int:
        from edje_index.indexing.shard_encoding import EncodingInterrupted, encode_ahead

        try:
            encode_ahead(task.shard, task.refs, self.encoder, on_report, should_stop)
        except EncodingInterrupted as error:
            raise TaskInterrupted from error
        return len(task.refs)


def open_ahead_worker(bundle: str, device: str, threads: int, dtype: str) -> Worker:
    """Load the encoder and return a worker that encodes shards ahead."""
    from edje_index.indexing.image_encoder import ImageEncoder

    return AheadWorker(ImageEncoder.open(bundle, device=device, threads=threads, dtype=dtype))


class EncodingAhead:
    """Context manager that runs an engine in a thread while the sources of a build are listed.

    The engine stops at the end of the `with` block. Its errors are only shown, because the build runs the engine again
    after the listing.

    Args:
        config: request for the build.
        on_event: callback that receives the events. It is only called from the thread of the caller.
        should_stop: also called from the thread of the engine, which stops once `should_stop()` returns True.
    """

    def __init__(self, config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop) -> None:
        self._config, self._on_event = config, on_event
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._should_stop: ShouldStop = lambda: self._stopped.is_set() or should_stop()
        self._is_started = False
        self._tasks: deque[AheadTask] = deque()
        self._messages: deque[str] = deque()
        self._encoded: dict[int, int] = {}  # number of rows by shard

    def start(self, build: PreparedBuild) -> OnShardListed:
        """Start the thread. Return a function that must be called with every full shard of the list.

        Args:
            build: build with the settings of the plan. Its inputs are not used.
        """
        threading.Thread(target=self._run, args=(build,), name="edje-encode-ahead").start()
        self._is_started = True
        root, plan = self._config.out, build.plan
        threads, reserve = decode_threads(plan.settings, build.workers), free_disk(root) // 2

        def on_shard_listed(shard: int, refs: list[InputRef]) -> None:
            if len(self._tasks) * plan.settings.shard_size < _WAITING_ROWS and free_disk(root) > reserve:
                rows = (shard + 1) * plan.settings.shard_size
                task = encoding_task(replace(plan, spec=replace(plan.spec, rows=rows)), shard, threads)
                self._tasks.append(AheadTask(task, tuple(replace(ref, metadata=None) for ref in refs)))

        return on_shard_listed

    def on_event(self, event: Event) -> None:
        """Pass `event` on. Events about the listing get the number of rows that are encoded already."""
        self._show_messages()
        rows = sum(self._encoded.copy().values())
        self._on_event(replace(event, encoded=rows) if isinstance(event, Progress) else event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from storage_formats.writing.pieces import rows_in_pieces

        if not self._is_started:
            return
        try:
            self._stopped.set()
            self._ended.wait()  # `Thread.join` of Python 3.11 would count the thread as ended after an interrupt
        finally:
            self._ended.wait()  # also after a second Ctrl-C, because the build keeps the lock of the index so long
        self._tasks.clear()  # frees the memory for the build, during which this object exists
        self._show_messages()
        rows = rows_in_pieces(Layout(self._config.out), ())
        if error is not None and rows:
            kept = f"{counted(rows, 'row')} encoded during the listing are kept in {self._config.out} for the next run"
            self._on_event(StatusMessage(kept))

    def _show_messages(self) -> None:
        while self._messages:
            self._on_event(StatusMessage(self._messages.popleft()))

    def _run(self, build: PreparedBuild) -> None:
        try:
            self._stopped.wait(PATIENCE_SECONDS)
            while not self._tasks and not self._should_stop():  # the engine starts when there is something to encode
                self._stopped.wait(_POLL_SECONDS)
            if not self._should_stop():
                self._encode(build)
        except Exception as error:
            self._messages.append(f"the encoding during the listing ended: {describe_error(error)}")
        finally:
            self._ended.set()

    def _encode(self, build: PreparedBuild) -> None:
        from edje_index.indexing.attempts import forget_attempt, forget_attempts

        layout = Layout(self._config.out)
        if self._config.address is not None:  # see `encode_shards`
            forget_attempts(layout)
        outcomes = engine_of(self._config, build).run(
            worker_factory(build.plan, open_ahead_worker),
            self._listed_tasks(),
            on_progress=lambda report: self._encoded.update({report.shard: report.done}),
            should_stop=self._should_stop,
        )
        with contextlib.closing(outcomes):
            for outcome in outcomes:
                if isinstance(outcome, TaskFailure):
                    raise EdjeError(f"shard {outcome.task.shard.shard}: {outcome.message}")
                if isinstance(outcome, Notice):
                    self._messages.append(outcome.message)
                    if outcome.repeated is not None:
                        forget_attempt(layout, outcome.repeated.shard.shard)
                else:
                    self._encoded[outcome.task.shard.shard] = outcome.result
        forget_attempts(layout)  # the engine has killed workers that did not stop in time

    def _listed_tasks(self) -> Iterator[AheadTask | None]:
        """Yield the tasks of listed shards, and None while no task waits. The engine ends with the listing."""
        while True:
            yield self._tasks.popleft() if self._tasks else None
