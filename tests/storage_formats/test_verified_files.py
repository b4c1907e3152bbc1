"""Downloads of chunks: no thread writes to a file descriptor after the file is closed."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from storage_formats.format.layout import Layout
from storage_formats.format.object_store import CHUNK_BYTES, ObjectStoreError
from storage_formats.format.shard_table import FileEntry
from storage_formats.verified_files import _download

KEY = "tokens/bf16/c.0.0.0"


class SlowFolder:
    """An object of four chunks. The chunks after the first one arrive late."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.is_reading = threading.Event()

    def info(self, key):
        return SimpleNamespace(size=4 * CHUNK_BYTES)

    def read_range(self, key, start, end):
        if start == 0 and self.fails:
            assert self.is_reading.wait(30)
            raise ObjectStoreError("the store refused")
        if start:
            self.is_reading.set()
            time.sleep(0.2)
        return memoryview(b"x" * 16)


class AbandonedDownloads(ThreadPoolExecutor):
    """Threads that are shut down once a late chunk is being read, before the next one is submitted."""

    def __init__(self, folder: SlowFolder) -> None:
        super().__init__(2)
        self.folder, self.submitted = folder, 0

    def submit(self, function, /, *arguments):
        self.submitted += 1
        if self.submitted == 3:
            assert self.folder.is_reading.wait(30)
            self.shutdown(wait=False, cancel_futures=True)
        return super().submit(function, *arguments)


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "abandoned"])
def test_no_chunk_is_written_after_a_download_has_ended(tmp_path, monkeypatch, fails):
    pwrite, written = os.pwrite, []

    def noted(descriptor, data, offset):
        written.append(offset)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr("storage_formats.verified_files.os.pwrite", noted)
    folder = SlowFolder(fails=fails)
    with ThreadPoolExecutor(2) if fails else AbandonedDownloads(folder) as downloads:
        entries = {KEY: FileEntry(KEY, 4 * CHUNK_BYTES, 0)}
        with pytest.raises(ObjectStoreError if fails else RuntimeError, match=r"the store refused|after shutdown"):
            _download(folder, Layout(tmp_path), entries, downloads, [tmp_path / KEY])
        before = list(written)
        with open(tmp_path / "other", "wb") as other:  # gets the descriptor of the closed file
            downloads.shutdown(wait=True)
            assert os.fstat(other.fileno()).st_size == 0
    assert written == before
    assert CHUNK_BYTES in written
