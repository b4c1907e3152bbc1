"""Token blocks from disk to a GPU: stored records cross the bus, and the device decodes them.

A quarter to a half of the bytes of bfloat16 blocks are copied, and no processor time goes into decoding. While one
pinned buffer is copied and decoded, the other is filled from disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from edje_index.fetching.device_decode import decode_records_torch
from edje_index.models.devices import resolve_device
from storage_formats.token_store import RowIds, TokenStore

_BUFFER_BYTES = 16 << 20  # some 10 ms of a disk: long against starting a copy


class DeviceFetcher:
    """Fetches blocks of a store to a device. Of one thread at a time; the store may be shared.

    Args:
        store: to read from.
        device: "auto", "cpu", "cuda" or "cuda:N". On a CPU it does the same without pinned memory.
        buffer_bytes: length of each of the two host buffers; no less than a record is used.

    Raises:
        ModelError: no such device.
    """

    def __init__(self, store: TokenStore, device: str = "auto", buffer_bytes: int = _BUFFER_BYTES) -> None:
        self.device = resolve_device(device)
        self._store = store
        cuda = self.device.type == "cuda"
        self._rows = max(1, buffer_bytes // store.record_bytes)
        shape = (self._rows, store.record_bytes)
        self._buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self._stream = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(2)] if cuda else []  # type: ignore[no-untyped-call]

    def fetch(self, row_ids: RowIds) -> torch.Tensor:
        """Blocks of `row_ids` as `TokenStore.fetch`, bfloat16 [k, m, d] on the device.

        On a GPU it returns when all is read, and the current stream waits for copies and decoding.
        """
        ids = np.asarray(row_ids)
        out = torch.empty((len(ids), *self._store.block_shape), dtype=torch.bfloat16, device=self.device)
        with self._side_stream(out):
            for turn, start in enumerate(range(0, len(ids), self._rows)):
                stop = min(start + self._rows, len(ids))
                records = self._land(ids[start:stop], turn % 2)
                out[start:stop] = decode_records_torch(self._store.precision, records, self._store.block_shape)
        return out

    def _land(self, ids: np.ndarray[tuple[int], np.dtype[np.integer]], buffer: int) -> torch.Tensor:
        """Records of `ids` on the device, by way of a host buffer once its last copy is done."""
        if self._copied:
            self._copied[buffer].synchronize()
        host = self._buffers[buffer][: len(ids)]
        self._store.fetch_records(ids, out=host.numpy())
        records = host.to(self.device, non_blocking=True)
        if self._copied:
            self._copied[buffer].record(self._stream)
        return records

    @contextlib.contextmanager
    def _side_stream(self, out: torch.Tensor) -> Iterator[None]:
        """On a GPU, work beside the current stream, which waits at the end."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        out.record_stream(self._stream)  # its memory is not used again while the stream may write there
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
