"""Copies stored records from disk to a GPU and decodes them there.

Copying records instead of decoded blocks saves transfer time: an FP8 record has about
half the bytes of a bfloat16 block, an NVFP4 record about a quarter.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from edje_index.fetching.device_decode import decode_records_torch
from edje_index.models.devices import plain_torch, resolve_device
from storage_formats.arguments import repr_of
from storage_formats.format.tombstones import check_row_ids
from storage_formats.token_store import RowIds, TokenStore

# Default size of each host buffer. A larger buffer would not make reads faster, and two
# buffers of this size fit even where pinned memory is scarce.
_BUFFER_BYTES = 64 << 20


class DeviceFetcher:
    """Fetches blocks from a store to a device. A fetcher is not thread-safe, but
    several fetchers may share a store.

    Args:
        store: the store to read from.
        device: "auto", "cpu", "cuda" or "cuda:N". For a GPU, the host buffers are
            pinned memory.
        buffer_bytes: maximum size in bytes of each of the two host buffers. If a record
            is larger, each buffer has the size of one record.

    Raises:
        ModelError: the device does not exist.

    Examples:
        >>> from edje_index import DeviceFetcher, TokenStore
        >>> fetcher = DeviceFetcher(TokenStore.open("photos.edje"), device="cpu")
        >>> fetcher.fetch([0, 3]).shape
        torch.Size([2, 4, 16])
    """

    @plain_torch()
    def __init__(
        self, store: TokenStore, device: str = "auto", buffer_bytes: int = _BUFFER_BYTES
    ) -> None:
        self.device = resolve_device(device)
        self._store = store
        cuda = self.device.type == "cuda"
        self._buffer_bytes = buffer_bytes
        self._rows = max(1, buffer_bytes // store.record_bytes)
        # The buffers are allocated when a fetch needs them, and are no larger than the
        # largest fetch needs.
        self._buffers = [torch.empty(0, store.record_bytes, dtype=torch.uint8)] * 2
        self._stream: torch.cuda.Stream | None = None
        self._copied: list[torch.cuda.Event] = []
        if cuda:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._stream = stream
            for _ in range(2):
                self._copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]

    __repr__ = repr_of("_store", "device")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._store, str(self.device), self._buffer_bytes)

    @plain_torch()
    def fetch(self, row_ids: RowIds) -> torch.Tensor:
        """Fetch the blocks of `row_ids`, bfloat16 [k, m, d] on the device.

        On a GPU, the method may return before the blocks are decoded. Later operations
        on the current CUDA stream wait for the blocks.

        Raises:
            UsageError, RowIdError, CorruptIndexError: as for `TokenStore.fetch`.
        """
        ids = check_row_ids(row_ids, len(self._store))
        # Rows are read in ascending order, so that each shard file is read once.
        order = np.argsort(ids)
        with contextlib.ExitStack() as side_stream:
            # On a GPU, copies and decoding run on a stream of their own. At the end,
            # the current stream waits for this stream.
            if self._stream is not None:
                current = torch.cuda.current_stream(self.device)
                side_stream.callback(current.wait_stream, self._stream)
                side_stream.enter_context(torch.cuda.stream(self._stream))
            out = torch.empty(
                (len(ids), *self._store.block_shape),
                dtype=torch.bfloat16,
                device=self.device,
            )
            if self._stream is not None:
                # `out` is allocated on the stream of this fetcher. Without this call,
                # PyTorch could use the memory of `out` again while the current stream
                # still reads the blocks.
                out.record_stream(current)
            offset = None
            if (values := self._store.offset) is not None:
                offset = torch.from_numpy(values).to(self.device)
            out_indices = torch.from_numpy(order).to(self.device)
            for turn, start in enumerate(range(0, len(ids), self._rows)):
                part = slice(start, start + self._rows)
                # the previous copy from the same host buffer must be finished
                if self._copied:
                    self._copied[turn % 2].synchronize()
                host = self._host_buffer(turn % 2, len(order[part]))
                self._store.fetch_records(ids[order[part]], out=host.numpy())
                records = host.to(self.device, non_blocking=True)
                if self._copied:
                    self._copied[turn % 2].record(self._stream)
                out[out_indices[part]] = decode_records_torch(
                    self._store.precision, records, self._store.block_shape, offset
                )
        return out

    def _host_buffer(self, turn: int, rows: int) -> torch.Tensor:
        """Return the first `rows` records of the host buffer with the index `turn`. If
        the buffer is too small, allocate a larger buffer.
        """
        if len(self._buffers[turn]) < rows:
            self._buffers[turn] = torch.empty(
                (rows, self._store.record_bytes),
                dtype=torch.uint8,
                pin_memory=self.device.type == "cuda",
            )
        return self._buffers[turn][:rows]
