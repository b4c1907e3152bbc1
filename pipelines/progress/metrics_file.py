"""Writes metrics of a running job for Prometheus, as a file for the textfile collector of node_exporter."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from edje_index.images.remote.urls import without_credentials
from pipelines.progress.events import Event, OnEvent, PlanReady, Progress
from pipelines.progress.stopping import is_stop_request
from storage_formats.errors import UsageError

_WRITE_SECONDS = 10.0
STATES = ("running", "finished", "stopped", "failed")


@contextlib.contextmanager
def metrics_file(path: Path, command: str, index: str) -> Iterator[OnEvent]:
    """Yield a callback that keeps the metrics in the file at `path` up to date.

    Args:
        path: file to replace at the start, every ten seconds, and at the end.
        command: name of the command, a label of all metrics.
        index: path or URL of the index, a label of all metrics. A password in a URL is left out.

    Raises:
        UsageError: the file cannot be written at the start.
    """
    metrics = JobMetrics(path, command, without_credentials(index))
    try:
        metrics.write("running")
    except OSError as error:
        problem = f"cannot write the metrics {path}: {error.strerror}; choose another file"
        raise UsageError(problem, parameter="metrics") from error
    try:
        yield metrics
    except BaseException as error:
        metrics.try_to_write("stopped" if is_stop_request(error) else "failed")
        raise
    metrics.try_to_write("finished")


class JobMetrics:
    """Callback that counts what a job has done. If the file cannot be written, the job goes on."""

    def __init__(self, path: Path, command: str, index: str, clock: Callable[[], float] = time.monotonic) -> None:
        from prometheus_client import CollectorRegistry, Gauge

        self._path = path
        self._labels = {"command": command, "index": index}
        self._clock = clock
        self._written_at = -_WRITE_SECONDS
        self._failed = False
        self._seconds = Counter[str]()
        self._registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"edje_job_{name}", text, ["command", "index", *labels], registry=self._registry)

        self._state = gauge("state", "1 for the state of the job, and 0 for the other states.", "state")
        self._start = gauge("start_seconds", "Unix time at which the job started.")
        self._done = gauge("done", "Finished units of work of an activity, for example rows.", "activity")
        self._total = gauge("total", "All units of work of an activity.", "activity")
        self._shards_finished = gauge("shards_finished", "Finished shards.")
        self._shards_total = gauge("shards_total", "All shards.")
        self._failed_rows = gauge("failed_rows", "Rows that could not be encoded.")
        self._stage = gauge("stage_seconds", "Seconds that all workers spent in a stage, in this run.", "stage")
        self._start.labels(**self._labels).set(time.time())

    def __call__(self, event: Event) -> None:
        """Count `event`. The file is replaced at most every ten seconds."""
        match event:
            case PlanReady():
                self._shards_total.labels(**self._labels).set(event.shards)
                self._shards_finished.labels(**self._labels).set(event.finished_shards)
            case Progress():
                self._count(event)
        if self._clock() - self._written_at >= _WRITE_SECONDS:
            self.try_to_write("running")

    def _count(self, event: Progress) -> None:
        self._done.labels(**self._labels, activity=event.activity).set(event.done)
        if event.total is not None:
            self._total.labels(**self._labels, activity=event.activity).set(event.total)
        if event.shards is not None:
            self._shards_finished.labels(**self._labels).set(event.shards.finished)
            self._shards_total.labels(**self._labels).set(event.shards.total)
            self._failed_rows.labels(**self._labels).set(event.shards.failed_rows)
        if event.finished_shard is not None:
            self._seconds.update(event.finished_shard.stage_seconds)
            for stage, seconds in self._seconds.items():
                self._stage.labels(**self._labels, stage=stage).set(seconds)

    def write(self, state: str) -> None:
        """Replace the file in one step. `state` is one of `STATES`. Raises OSError if the file cannot be written."""
        from prometheus_client import write_to_textfile

        for each in STATES:
            self._state.labels(**self._labels, state=each).set(each == state)
        self._written_at = self._clock()
        write_to_textfile(str(self._path), self._registry)

    def try_to_write(self, state: str) -> None:
        """Replace the file. The first error is printed on standard error; then the file is not written again."""
        if self._failed:
            return
        try:
            self.write(state)
        except OSError as error:
            print(f"cannot write the metrics {self._path}: {error.strerror}; the job goes on", file=sys.stderr)
            self._failed = True
