"""Token blocks from disk to a GPU: the stored records are copied, and the device decodes them.

With FP8 or NVFP4 this copies half or a quarter of the bytes of bfloat16 blocks and takes no CPU time for decoding. One
pinned buffer is filled from disk while the other is copied and decoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from edje_index.fetching.device_decode import decode_records_torch
from edje_index.models.devices import resolve_device
from storage_formats.token_store import RowIds, TokenStore

_BUFFER_BYTES = 16 << 20  # about 10 ms of reading, which is long compared with starting a copy


class DeviceFetcher:
    """Fetches blocks of a store to a device. Not thread-safe; several fetchers may share a store.

    Args:
        store: the store to read from.
        device: "auto", "cpu", "cuda" or "cuda:N". The CPU works the same way, without pinned memory.
        buffer_bytes: length of each of the two host buffers; at least one record is used.

    Raises:
        ModelError: the device does not exist.

    Example:
        >>> from edje_index import DeviceFetcher, TokenStore
        >>> fetcher = DeviceFetcher(TokenStore.open("photos.edje"), device="cpu")
        >>> fetcher.fetch([0, 3]).shape
        torch.Size([2, 4, 16])
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
        """Blocks of `row_ids`, bfloat16 [k, m, d] on the device; errors as `TokenStore.fetch`.

        On a GPU this returns when everything is read, and the current stream waits for copying and decoding.
        """
        ids = np.asarray(row_ids)
        out = torch.empty((len(ids), *self._store.block_shape), dtype=torch.bfloat16, device=self.device)
        with self._side_stream(out):
            for turn, start in enumerate(range(0, len(ids), self._rows)):
                stop = min(start + self._rows, len(ids))
                records = self._copy_records(ids[start:stop], turn % 2)
                out[start:stop] = decode_records_torch(self._store.precision, records, self._store.block_shape)
        return out

    def _copy_records(self, ids: np.ndarray[tuple[int], np.dtype[np.integer]], buffer: int) -> torch.Tensor:
        """Records of `ids` on the device, copied through a host buffer when its previous copy is done."""
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
        """On a GPU, run the block on a side stream; the current stream waits for it at the end."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        out.record_stream(self._stream)  # PyTorch must not reuse its memory while the side stream may write to it
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
