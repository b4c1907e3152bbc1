"""Shapes of the indexes in the tests of reading, and eviction from the page cache."""

from __future__ import annotations

import os
import sys
import time

import pytest

from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.reading import engines
from storage_formats.reading.files import ShardFile
from storage_formats.reading.queues import can_queue

ALL = [*engines(), "auto"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

# bf16 records of 512 bytes are whole sectors. Those of quantized precisions and of the
# odd shape are not.
SPEC = IndexSpec(
    300,
    64,
    (8, 32),
    6,
    precisions=("bf16", "fp8", "nvfp4"),
)
ODD = IndexSpec(90, 40, (3, 7), 6, precisions=("bf16", "fp8"))
HOLES = frozenset({0, 63, 64, 299})


def evict(root, precision="bf16"):
    """Evict the shard files from the page cache. They were flushed when the index
    was written.
    """
    for path in Layout(root).token_array(precision).glob("c.*"):
        with open(path, "rb") as file:
            shard = ShardFile(file.fileno(), path.stat().st_size, str(path))
            # a page stays that the kernel looks at in this moment
            for _ in range(20):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if not shard._cached_share():
                    break
                time.sleep(0.01)


def flip(path, offset, bit=0):
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def without_queues(monkeypatch):
    """Let no engine use queues, as on a machine that has none."""
    for module in ("queues", "local_reads"):
        monkeypatch.setattr(
            f"storage_formats.reading.{module}.can_queue", lambda: False
        )


needs_queues = pytest.mark.skipif(not can_queue(), reason="needs Linux AIO")
