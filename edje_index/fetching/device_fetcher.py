"""Copies stored records from disk to a GPU and decodes them there.

Copying records instead of decoded blocks saves transfer time: an FP8 record has about
half the bytes of a bfloat16 block, an NVFP4 record about a quarter.

The decoded blocks equal those of the NumPy codecs bit by bit. SPEC.md section 6.1
defines the records. If the scales have one byte, decoding looks up each product of
scale and code in a table. A multiplication on the device could give other results,
because some devices flush subnormal numbers to zero.
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import torch

from edje_index.models.devices import fused_on_cuda, plain_torch, resolve_device
from storage_formats.arguments import repr_of
from storage_formats.codecs import codec
from storage_formats.codecs.formats import CANONICAL_NAN, FORMATS
from storage_formats.format.tombstones import check_row_ids
from storage_formats.token_store import RowIds, TokenStore

# Default size of each host buffer. A larger buffer would not make reads faster, and two
# buffers of this size fit even where pinned memory is scarce.
_BUFFER_BYTES = 64 << 20


_FUSED_RECORDS = 1024


def decode_records_torch(
    name: str,
    records: torch.Tensor,
    block_shape: tuple[int, int],
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode stored records.

    Args:
        name: precision of the records, one of `storage_formats.precisions()`.
        records: uint8 [k, record_bytes], on any device.
        block_shape: (m, d), the shape of one block.
        offset: offset block that is added to each block, float32 [m, d], on the device
            of `records`. None adds nothing.

    Returns:
        Blocks, bfloat16 [k, m, d], on the device of `records`. For the precision
        `bf16`, the blocks may share memory with `records`.
    """
    entry = codec(name, block_shape)
    if not entry.has_offset:
        return records.contiguous().view(torch.bfloat16).reshape(-1, *block_shape)
    form = entry.form
    table = _table(name, records.device)
    codes_bytes = entry.values * form.code_bits // 8
    # On CUDA, the fused kernels are compiled for exactly `_FUSED_RECORDS` records, so
    # the records are split into parts of this length.
    size = _FUSED_RECORDS if records.device.type == "cuda" else max(1, len(records))
    parts = []
    for part in torch.split(records, size):
        scales = part[:, codes_bytes:]
        if form.scale_bytes == 2:
            scales = scales.contiguous().view(torch.bfloat16).float()
        codes = part[:, :codes_bytes]
        parts.append(_decode(codes, scales, table, form.code_bits, block_shape, offset))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@fused_on_cuda(lambda codes: len(codes) == _FUSED_RECORDS, dynamic=False)
def _decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    code_bits: int,
    block_shape: tuple[int, int],
    offset: torch.Tensor | None,
) -> torch.Tensor:
    if code_bits < 8:
        shifts = torch.arange(0, 8, code_bits, dtype=torch.uint8, device=codes.device)
        codes = (codes.unsqueeze(-1) >> shifts) & (2**code_bits - 1)
    group = block_shape[0] * block_shape[1] // scales.shape[1]
    indices = codes.reshape(*scales.shape, group).int()
    scales = scales.unsqueeze(-1)
    if scales.dtype == torch.uint8:
        numbers = table[scales.int() * 2**code_bits + indices].float()
    else:
        numbers = table[indices] * scales
    numbers = numbers.reshape(-1, *block_shape)
    if offset is not None:
        numbers = numbers + offset
    blocks = numbers.bfloat16()
    # Every NaN becomes the NaN that the NumPy codecs return. `masked_fill` gets a
    # Python number, because copying a tensor from the host would wait for all work on
    # the device.
    bits = blocks.view(torch.int16).masked_fill(blocks.isnan(), CANONICAL_NAN)
    return bits.view(torch.bfloat16)


@functools.lru_cache(maxsize=32)
def _table(name: str, device: torch.device) -> torch.Tensor:
    """Return the value of each code, or, if the scales have one byte, the product of
    each scale and each code, as bfloat16 values on `device`.
    """
    form = FORMATS[name]
    if form.scale_bytes == 2:
        return torch.from_numpy(form.values).to(device)
    bits = torch.from_numpy(form.products().view(np.int16))
    return bits.view(torch.bfloat16).to(device)


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
        self._rows = max(1, buffer_bytes // store.record_bytes)
        # The buffers are allocated when a fetch needs them, and are no larger than the
        # largest fetch needs.
        self._buffers = [torch.empty(0, store.record_bytes, dtype=torch.uint8)] * 2
        self._stream: torch.cuda.Stream | None = None
        self._copied: list[torch.cuda.Event] = []
        if self.device.type == "cuda":
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._stream = stream
            for _ in range(2):
                self._copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]

    __repr__ = repr_of("_store", "device")

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
            for number, start in enumerate(range(0, len(ids), self._rows)):
                turn = number % 2
                rows = order[start : start + self._rows]
                # the previous copy from the same host buffer must be finished
                if self._copied:
                    self._copied[turn].synchronize()
                if len(self._buffers[turn]) < len(rows):
                    self._buffers[turn] = torch.empty(
                        (len(rows), self._store.record_bytes),
                        dtype=torch.uint8,
                        pin_memory=self.device.type == "cuda",
                    )
                host = self._buffers[turn][: len(rows)]
                self._store.fetch_records(ids[rows], out=host.numpy())
                records = host.to(self.device, non_blocking=True)
                if self._copied:
                    self._copied[turn].record(self._stream)
                positions = out_indices[start : start + self._rows]
                out[positions] = decode_records_torch(
                    self._store.precision, records, self._store.block_shape, offset
                )
        return out
