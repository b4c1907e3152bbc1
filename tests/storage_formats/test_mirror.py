"""The cache of an index on an object store: processes that share it do not disturb each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage_formats.format.layout import Layout
from storage_formats.format.mirror import download_snapshots
from storage_formats.format.object_store import ObjectFolder

obstore_store = pytest.importorskip("obstore.store")


def test_two_readers_remove_the_same_snapshots(tmp_path: Path) -> None:
    folder, layout, readers = ObjectFolder("s3://bucket/photos.edje", obstore_store.MemoryStore()), Layout(tmp_path), 4
    folder.store.put("snapshots/1000.json", b"{}")
    layout.snapshot(0).parent.mkdir()
    for number in range(300):
        layout.snapshot(number).touch()
    together = threading.Barrier(readers)

    def read(_: int) -> None:
        together.wait()
        download_snapshots(folder, layout)

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, range(readers)))
    assert [path.name for path in layout.snapshot(0).parent.iterdir()] == ["1000.json"]
