"""The copy job: copies an index between directories and object stores."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.new_index import new_index
from pipelines.progress.events import JobStopped, OnEvent, Progress, ShouldStop, StatusMessage

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.object_store import IndexLocation
    from storage_formats.format.shard_table import FileEntry
    from storage_formats.writing.index_copy import CopyTarget

_FILES_AT_ONCE = 8


@dataclass(frozen=True)
class CopyResult:
    """The result of a copy.

    Attributes:
        snapshot: number of the copied snapshot.
        files: number of files of the snapshot, apart from `index.json`.
        copied_files: number of files that this run copied. The other files were already in the destination.
        copied_bytes: length of the copied files in bytes.
        seconds: wall time of this run.

    Example:
        >>> from pipelines import copy_index
        >>> result = copy_index("photos.edje", "backup.edje")
        >>> result.snapshot, result.files
        (0, 9)
    """

    snapshot: int
    files: int
    copied_files: int
    copied_bytes: int
    seconds: float


def run_copy(
    source: IndexLocation,
    out: IndexLocation,
    on_event: OnEvent,
    should_stop: ShouldStop = lambda: False,
    *,
    snapshot: int | None = None,
    replace: bool = False,
) -> CopyResult:
    """Copy a snapshot of the index at `source` to `out`. Each is a directory or a URL. See `pipelines.copy_index`."""
    from storage_formats.errors import UsageError
    from storage_formats.format.mirror import open_index
    from storage_formats.format.object_store import index_location, is_url
    from storage_formats.writing.index_copy import files_to_copy

    if replace and not is_url(out):
        raise UsageError(
            f"only an index at a URL can be replaced, but {out} is a directory; leave out `replace`",
            parameter="replace",
        )
    out = index_location(out)
    started = time.monotonic()
    index = open_index(source, snapshot)
    entries = files_to_copy(index)
    on_event(StatusMessage(f"copying {len(entries):,} files of snapshot {index.manifest.snapshot.number}"))
    job = _Job(index, entries, on_event, should_stop)
    copied = job.to_object_store(str(out), replace=replace) if is_url(out) else job.to_directory(Path(out))
    return CopyResult(
        snapshot=index.manifest.snapshot.number,
        files=len(entries),
        copied_files=len(copied),
        copied_bytes=sum(entry.bytes for entry in copied),
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class _Job:
    index: CommittedIndex
    entries: Sequence[FileEntry]
    on_event: OnEvent
    should_stop: ShouldStop

    def to_directory(self, out: Path) -> list[FileEntry]:
        """Copy the files to the new directory `out`. Return the entries of the files that were copied."""
        from storage_formats.atomic import write_bytes_atomic
        from storage_formats.format.layout import Layout
        from storage_formats.writing.index_copy import DirectoryTarget, manifest_bytes

        data = manifest_bytes(self.index)
        with new_index(out, f"copy {hashlib.sha256(data).hexdigest()}", self.index.manifest.spec) as partial:
            copied = self._copy_files(DirectoryTarget(partial))
            write_bytes_atomic(Layout(partial).manifest, data)
        return copied

    def to_object_store(self, url: str, *, replace: bool) -> list[FileEntry]:
        """Copy the files to `url`. If `replace` is True, first remove the index at `url`.

        Return the entries of the files that were copied.
        """
        from storage_formats.format.object_store import ObjectFolder
        from storage_formats.writing.index_copy import begin_remote_copy

        target = begin_remote_copy(self.index, ObjectFolder.open(url), self.entries, replace=replace)
        copied = self._copy_files(target)
        target.commit(self.index, self.entries)
        return copied

    def _copy_files(self, target: CopyTarget) -> list[FileEntry]:
        copied: list[FileEntry] = []
        running: dict[Future[bool], FileEntry] = {}
        done, waiting = 0, iter(self.entries)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            while True:
                stopped = self.should_stop()
                while not stopped and len(running) < 2 * _FILES_AT_ONCE and (entry := next(waiting, None)):
                    running[pool.submit(target.copy, self.index, entry)] = entry
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    entry = running.pop(future)
                    if future.result():
                        copied.append(entry)
                    done += 1
                self.on_event(Progress("copying files", done, len(self.entries)))
        if done < len(self.entries):
            raise JobStopped(f"stopped after {done:,} of {len(self.entries):,} files; the copied files are kept")
        return copied
