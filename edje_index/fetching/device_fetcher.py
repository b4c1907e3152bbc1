"""Copies stored records from disk to a GPU and decodes them there.

FP8 records have about half the bytes of decoded bfloat16 blocks, NVFP4 records about a
quarter.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from edje_index.fetching.device_decode import decode_records_torch
from edje_index.models.devices import resolve_device
from storage_formats.arguments import repr_of
from storage_formats.token_store import RowIds, TokenStore

# takes about 10 ms to read, much longer than starting a copy to the device
_BUFFER_BYTES = 16 << 20


class DeviceFetcher:
    """Fetches blocks from a store to a device. A fetcher is not thread-safe, but
    several fetchers may share a store.

    Args:
        store: the store to read from.
        device: "auto", "cpu", "cuda" or "cuda:N". For the CPU, no pinned memory is
            used.
        buffer_bytes: size in bytes of each of the two host buffers. If a record is
            larger, each buffer has the size of a record.

    Raises:
        ModelError: the device does not exist.

    Examples:
        >>> from edje_index import DeviceFetcher, TokenStore
        >>> fetcher = DeviceFetcher(TokenStore.open("photos.edje"), device="cpu")
        >>> fetcher.fetch([0, 3]).shape
        torch.Size([2, 4, 16])
    """

    def __init__(
        self, store: TokenStore, device: str = "auto", buffer_bytes: int = _BUFFER_BYTES
    ) -> None:
        self.device = resolve_device(device)
        self._store = store
        cuda = self.device.type == "cuda"
        self._rows = max(1, buffer_bytes // store.record_bytes)
        shape = (self._rows, store.record_bytes)
        self._buffers = [
            torch.empty(shape, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)
        ]
        self._stream: torch.cuda.Stream | None = None
        self._copied: list[torch.cuda.Event] = []
        if cuda:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._stream = stream
            for _ in range(2):
                self._copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]

    __repr__ = repr_of("_store", "device")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._store, str(self.device), self._buffers[0].nbytes)

    def fetch(self, row_ids: RowIds) -> torch.Tensor:
        """Fetch the blocks of `row_ids`, bfloat16 [k, m, d] on the device.

        On a GPU, the method may return before the blocks are decoded. Later operations
        on the current CUDA stream wait for the blocks.

        Raises:
            UsageError, RowIdError, CorruptIndexError: as for `TokenStore.fetch`.
        """
        ids = np.asarray(row_ids)
        out = torch.empty(
            (len(ids), *self._store.block_shape),
            dtype=torch.bfloat16,
            device=self.device,
        )
        with contextlib.ExitStack() as side_stream:
            if self._stream is not None:
                current = torch.cuda.current_stream(self.device)
                self._stream.wait_stream(current)
                # else PyTorch could reuse the memory while the side stream writes
                out.record_stream(self._stream)
                side_stream.callback(current.wait_stream, self._stream)
                side_stream.enter_context(torch.cuda.stream(self._stream))
            offset = None
            if (values := self._store.offset) is not None:
                offset = torch.from_numpy(values).to(self.device)
            for turn, start in enumerate(range(0, len(ids), self._rows)):
                part = ids[start : start + self._rows]
                # the previous copy from the same host buffer must be finished
                if self._copied:
                    self._copied[turn % 2].synchronize()
                host = self._buffers[turn % 2][: len(part)]
                self._store.fetch_records(part, out=host.numpy())
                records = host.to(self.device, non_blocking=True)
                if self._copied:
                    self._copied[turn % 2].record(self._stream)
                blocks = decode_records_torch(
                    self._store.precision, records, self._store.block_shape, offset
                )
                out[start : start + len(part)] = blocks
        return out
