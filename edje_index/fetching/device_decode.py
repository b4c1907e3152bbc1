"""Decoding of stored records with PyTorch, on the device that holds them. The bits equal those of the codecs.

SPEC.md section 6.1 defines the records. Codes with one-byte scales are decoded through a table of all products, because
devices differ in how they treat subnormal numbers.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from storage_formats.codecs import BF16, codec
from storage_formats.codecs.group_scaled import GroupScaledCodec
from storage_formats.codecs.minifloat import CANONICAL_NAN, E2M1
from storage_formats.errors import UsageError


def decode_records_torch(name: str, records: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """Decode stored records.

    Args:
        name: precision of the records, one of `storage_formats.precisions()`.
        records: uint8 [k, record_bytes], on any device.
        block_shape: (m, d).

    Returns:
        bfloat16 [k, m, d] on the same device. For `bf16` it shares memory with contiguous `records`.

    Raises:
        UsageError: an unknown precision, or records of the wrong length or type.
    """
    entry = codec(name, block_shape)
    if records.dtype != torch.uint8 or records.ndim != 2 or records.shape[1] != entry.record_bytes:
        raise UsageError(f"records must be uint8 [k, {entry.record_bytes}], got {records.dtype} {list(records.shape)}")
    if isinstance(entry, GroupScaledCodec):
        blocks = _decode_groups(entry, records)
    elif name == "int8":
        blocks = _decode_int8(records, block_shape)
    elif name == "sign1":
        blocks = _decode_sign1(records, block_shape)
    elif name == "fp16":
        blocks = _canonical(_words(records).view(torch.float16).float().bfloat16())
    else:
        blocks = _words(records).view(torch.bfloat16)
    return blocks.reshape(len(records), *block_shape)


def _decode_groups(entry: GroupScaledCodec, records: torch.Tensor) -> torch.Tensor:
    codes, scales = records[:, : entry.codes_bytes], records[:, entry.codes_bytes :]
    if entry.element is E2M1:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1)
    table = _products(entry.name, records.device)
    groups = codes.reshape(*scales.shape, entry.group).int()
    return table.view(torch.bfloat16)[(scales.int() * (len(table) // 256)).unsqueeze(-1) + groups]


@functools.lru_cache(maxsize=32)
def _products(name: str, device: torch.device) -> torch.Tensor:
    """Bits of scale x code, int16 [256 scales * codes]."""
    entry = codec(name)
    assert isinstance(entry, GroupScaledCodec)
    with np.errstate(over="ignore", invalid="ignore"):  # the table has products that no encoder writes
        products = (entry.scale_values[:, None] * entry.element.values).astype(BF16)
    bits = np.where(np.isnan(products), np.uint16(CANONICAL_NAN), products.view(np.uint16))
    return torch.from_numpy(bits.reshape(-1).view(np.int16)).to(device)


def _decode_int8(records: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    values = block_shape[0] * block_shape[1]
    codes = records[:, :values].view(torch.int8).reshape(-1, *block_shape).float()
    scales = _words(records[:, values:]).view(torch.bfloat16).float()
    return _canonical((codes * scales.unsqueeze(-1)).bfloat16())


def _decode_sign1(records: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    size = block_shape[0] * block_shape[1] // 8
    bits = torch.arange(8, dtype=torch.uint8, device=records.device)
    negative = (records[:, :size].unsqueeze(-1) >> bits) & 1
    signs = negative.reshape(-1, *block_shape).to(torch.int16) << 15
    return _canonical((_words(records[:, size:]).unsqueeze(-1) ^ signs).view(torch.bfloat16))


def _words(data: torch.Tensor) -> torch.Tensor:
    """Little-endian words of bytes [k, 2 n], int16 [k, n]."""
    return data.contiguous().view(torch.int16)


def _canonical(blocks: torch.Tensor) -> torch.Tensor:
    """`blocks` with every NaN replaced by the one that the codecs return."""
    bits = blocks.view(torch.int16)
    return torch.where(blocks.isnan(), torch.tensor(CANONICAL_NAN, dtype=torch.int16, device=bits.device), bits).view(
        torch.bfloat16
    )
