"""Checks that workers on other machines see the index directory of the job."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

from pipelines.engines.base import Worker, WorkerFactory
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout


def on_shared_directory(root: Path, make_worker: WorkerFactory) -> WorkerFactory:
    """Return a worker factory that checks the index directory before it calls `make_worker`.

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
