"""Reads a remote file in large blocks, for parsers that read it in small steps."""

from __future__ import annotations

import threading
from collections import OrderedDict

from edje_index.images.remote.access import read_remote_range

BLOCK_BYTES = 4 << 20
_KEPT_BLOCKS = 4


class BlockReader:
    """Reads byte ranges of a remote file in blocks, and keeps the latest blocks in memory. Thread-safe.

    Args:
        url: URL of the file.
        length: number of bytes of the file.
    """

    def __init__(self, url: str, length: int) -> None:
        self._url = url
        self._length = length
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def pread(self, size: int, offset: int) -> bytes:
        """Return the bytes [offset, offset + size). Raises as `read_remote`."""
        stop = min(offset + size, self._length)
        parts = []
        while offset < stop:
            number, start = divmod(offset, BLOCK_BYTES)
            part = self._block(number)[start : start + stop - offset]
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        with self._lock:
            block = self._blocks.pop(number, None)
            if block is None:
                start = number * BLOCK_BYTES
                block = read_remote_range(self._url, min(BLOCK_BYTES, self._length - start), start)
            self._blocks[number] = block
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            return block
