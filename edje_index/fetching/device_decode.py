"""Decodes stored records with PyTorch, on any device.

The results equal those of the NumPy codecs bit by bit. SPEC.md section 6.1 defines the
records.

If the scales have one byte, decoding looks up each product of scale and code in a
table. A multiplication on the device could give other results, because some devices
flush subnormal numbers to zero.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from edje_index.models.devices import fused_on_cuda
from storage_formats.codecs import codec
from storage_formats.codecs.formats import CANONICAL_NAN, FORMATS
from storage_formats.errors import UsageError

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

    Raises:
        UsageError: the precision is unknown, or `records` has the wrong shape or dtype.
    """
    entry = codec(name, block_shape)
    if (
        records.dtype != torch.uint8
        or records.ndim != 2
        or records.shape[1] != entry.record_bytes
    ):
        raise UsageError(
            f"records must be uint8 [k, {entry.record_bytes}], got {records.dtype}"
            f" {list(records.shape)}"
        )
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
