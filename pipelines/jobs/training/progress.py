"""Reports the progress of a training run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from edje_index.progress import OnProgress
from pipelines.progress.events import JobStopped, OnEvent, Progress, ShouldStop, StatusMessage

_REPORT_SECONDS = 5.0
_LOSSES = ("loss", "itm", "mlm", "recovery", "distillation", "accuracy")


def stoppable_progress(on_event: OnEvent, should_stop: ShouldStop) -> OnProgress:
    """Return a callback that reports progress and raises JobStopped once `should_stop()` returns True."""

    def progress(activity: str, done: int, total: int) -> None:
        if should_stop():
            raise JobStopped(
                f"stopped while {activity}, after {done:,} of {total:,}; run the command again to continue"
            )
        on_event(Progress(activity, done, total))

    return progress


def step_progress(on_event: OnEvent, clock: Callable[[], float] = time.monotonic) -> Callable[[dict[str, Any]], None]:
    """Return a callback that reports log records to `on_event`, at most one record every five seconds."""
    # The last record of a phase is always shown.
    last = -_REPORT_SECONDS
    warned = False

    def report(record: dict[str, Any]) -> None:
        nonlocal last, warned
        if not record.get("tensorboard", True) and not warned:
            warned = True
            on_event(StatusMessage("no TensorBoard log: the package 'tensorboard' is not installed; see log.jsonl"))
        if "lr" not in record or record["step"] == record["steps"] or clock() - last >= _REPORT_SECONDS:
            last = clock()
            on_event(StatusMessage(describe_record(record)))

    return report


def describe_record(record: dict[str, Any]) -> str:
    """Return a log record as one line of text."""
    parts = [f"{record['phase']} {record['step']:,}/{record['steps']:,}"]
    if "lr" not in record:  # an evaluation
        return ", ".join(parts + [f"{name} R@1 {100 * record[name]:.1f}" for name in ("t2i", "i2t")])
    parts += [f"{name} {record[name]:.3f}" for name in _LOSSES if name in record]
    parts += [f"lr {record['lr']:.2e}", f"{record['images_per_second']:.1f} images/s"]
    parts.append(f"{(record['steps'] - record['step']) * record['step_seconds'] / 60:.0f} min left")
    if record["data_wait"] > 0.1 * record["seconds"]:
        parts.append(f"waiting for data {record['data_wait'] / record['seconds']:.0%} of the time")
    if record["skipped"]:
        parts.append(f"skipped {record['skipped']}")
    if record.get("unreadable"):
        parts.append(f"unreadable images {record['unreadable']}")
    return ", ".join(parts)
