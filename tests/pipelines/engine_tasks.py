"""Small real workers for the engine tests: what they do is seen in the file system
and in their results.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from storage_formats.errors import TaskInterrupted


@dataclass(frozen=True)
class Job:
    """A task: what to do, under which name."""

    name: int
    action: str = "succeed"


@dataclass(frozen=True)
class Report:
    """Progress of a task."""

    name: int
    step: int
    process: int


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("this error stays where it is")


class FileWorker:
    """Appends a line to `folder`/<name> for each attempt at a task."""

    def __init__(self, folder):
        self.folder = Path(folder)
        (self.folder / f"worker-{os.getpid()}").touch()

    def __call__(self, job, on_progress, should_stop):
        with open(self.folder / str(job.name), "a") as file:
            file.write("attempt\n")
        return getattr(self, job.action)(job, on_progress, should_stop)

    def attempts(self, job):
        return (self.folder / str(job.name)).read_text().count("attempt")

    def succeed(self, job, on_progress, should_stop):
        on_progress(Report(job.name, 1, os.getpid()))
        return job.name * 10

    def report_slowly(self, job, on_progress, should_stop):
        for step in range(12):
            on_progress(Report(job.name, step, os.getpid()))
            time.sleep(0.1)
        return job.name * 10

    def raise_unpicklable(self, job, on_progress, should_stop):
        raise UnpicklableError("cannot travel")

    def fill_disk(self, job, on_progress, should_stop):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/photos.edje/tokens")

    def until_stopped(self, job, on_progress, should_stop):
        for step in range(600):
            if should_stop():
                (self.folder / f"stopped-{job.name}").touch()
                raise TaskInterrupted
            on_progress(Report(job.name, step, os.getpid()))
            time.sleep(0.05)
        raise AssertionError("nobody asked for a stop")

    def wait_for_go(self, job, on_progress, should_stop):
        while not (self.folder / "go").exists():
            time.sleep(0.1)
        return job.name * 10

    def die_once(self, job, on_progress, should_stop):
        if self.attempts(job) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return job.name * 10

    def die(self, job, on_progress, should_stop):
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, job, on_progress, should_stop):
        # the kernel continues stopped processes if their process group is orphaned
        while True:
            os.kill(os.getpid(), signal.SIGSTOP)

    def report_for_long(self, job, on_progress, should_stop):
        for step in range(80):
            on_progress(Report(job.name, step, os.getpid()))
            time.sleep(0.1)
        return job.name * 10


def broken_worker():
    raise RuntimeError("no such weights")


def run_jobs(
    engine,
    folder,
    jobs,
    *,
    on_progress=lambda _: None,
    on_event=lambda _: None,
    should_stop=lambda: False,
):
    """Results of `jobs` on workers that leave their traces in `folder`."""
    make_worker = functools.partial(FileWorker, str(folder))
    return engine(
        make_worker,
        jobs,
        on_progress=on_progress,
        on_event=on_event,
        should_stop=should_stop,
    )
