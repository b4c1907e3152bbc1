"""Decodes stored records with PyTorch, on any device.

The results equal those of the NumPy codecs bit by bit. SPEC.md section 6.1 defines the
records.

For the precisions with E4M3 or E2M1 codes, decoding looks up each product of scale and
code in a table. A multiplication on the device could give other results, because some
devices flush subnormal numbers to zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from edje_index.models.devices import fused_on_cuda
from storage_formats.codecs import Codec, codec
from storage_formats.codecs.formats import LARGE_LEVEL, GroupScaledCodec, SignCodec
from storage_formats.codecs.minifloat import CANONICAL_NAN, E2M1
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
        UsageError: the precision is unknown or has no decoder here, or `records` has
            the wrong shape or dtype.
    """
    entry = codec(name, block_shape)
    if name not in _DECODERS:
        raise UsageError(
            f"precision '{name}' cannot be decoded with PyTorch; fetch the blocks with"
            " TokenStore.fetch"
        )
    if (
        records.dtype != torch.uint8
        or records.ndim != 2
        or records.shape[1] != entry.record_bytes
    ):
        raise UsageError(
            f"records must be uint8 [k, {entry.record_bytes}], got {records.dtype}"
            f" {list(records.shape)}"
        )
    # On CUDA, the fused kernels are compiled for exactly `_FUSED_RECORDS` records, so
    # the records are split into parts of this length.
    size = _FUSED_RECORDS if records.device.type == "cuda" else max(1, len(records))
    parts = []
    for part in torch.split(records, size):
        blocks = _DECODERS[name](entry, part).reshape(len(part), *block_shape)
        if offset is not None:
            blocks = _with_offset(blocks, offset)
        elif blocks.dtype == torch.float32:
            blocks = _canonical(blocks.bfloat16())
        parts.append(blocks)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@fused_on_cuda(lambda records: len(records) == _FUSED_RECORDS, dynamic=False)
def _with_offset(blocks: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return _canonical((blocks.float() + offset).bfloat16())


def _decode_groups(entry: Codec, records: torch.Tensor) -> torch.Tensor:
    assert isinstance(entry, GroupScaledCodec)
    return _look_up(
        records,
        _products(type(entry), records.device),
        entry.codes_bytes,
        entry.group,
        entry.element is E2M1,
    )


@fused_on_cuda(lambda records: len(records) == _FUSED_RECORDS, dynamic=False)
def _look_up(
    records: torch.Tensor,
    products: torch.Tensor,
    codes_bytes: int,
    group: int,
    is_packed: bool,
) -> torch.Tensor:
    codes = records[:, :codes_bytes]
    scales = records[:, codes_bytes:]
    if is_packed:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1)
    codes_per_scale = len(products) // 256
    first_products = scales.int() * codes_per_scale
    groups = codes.reshape(*scales.shape, group).int()
    bits = products[first_products.unsqueeze(-1) + groups]
    return bits.view(torch.bfloat16)


@functools.lru_cache(maxsize=32)
def _products(
    codec_class: type[GroupScaledCodec], device: torch.device
) -> torch.Tensor:
    """Return a copy on `device` of the table `codec_class.products()`, as int16 [256 *
    number of codes].
    """
    return torch.from_numpy(codec_class.products().view(np.int16)).to(device)


def _decode_int8(entry: Codec, records: torch.Tensor) -> torch.Tensor:
    codes = (
        records[:, : entry.values]
        .view(torch.int8)
        .reshape(-1, *entry.block_shape)
        .float()
    )
    scales = _words(records[:, entry.values :]).view(torch.bfloat16).float()
    return codes * scales.unsqueeze(-1)


def _decode_signs(entry: Codec, records: torch.Tensor) -> torch.Tensor:
    assert isinstance(entry, SignCodec)
    bits = entry.code_bits
    size = entry.values * bits // 8
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=records.device)
    codes = (records[:, :size].unsqueeze(-1) >> shifts) & (2**bits - 1)
    levels = records.new_tensor(
        [1.0, -1.0, LARGE_LEVEL, -LARGE_LEVEL], dtype=torch.float32
    )
    values = levels[codes.reshape(-1, *entry.block_shape).int()]
    scale = _words(records[:, size:]).view(torch.bfloat16).float().unsqueeze(-1)
    return values * scale


def _words(data: torch.Tensor) -> torch.Tensor:
    """View bytes, uint8 [k, 2 n], as little-endian 16-bit words, int16 [k, n]."""
    return data.contiguous().view(torch.int16)


def _canonical(blocks: torch.Tensor) -> torch.Tensor:
    """Replace every NaN with the NaN that the NumPy codecs return."""
    bits = blocks.view(torch.int16)
    # `masked_fill` gets a Python number, because copying a tensor from the host would
    # wait for all work on the device.
    return bits.masked_fill(blocks.isnan(), CANONICAL_NAN).view(torch.bfloat16)


# A decoder returns bfloat16 or float32. `decode_records_torch` rounds float32 results
# to bfloat16.
_DECODERS: dict[str, Callable[[Codec, torch.Tensor], torch.Tensor]] = {
    "bf16": lambda _, records: _words(records).view(torch.bfloat16),
    "int8": _decode_int8,
    "gauss2": _decode_signs,
    "sign1": _decode_signs,
    **dict.fromkeys(("fp8", "mxfp4", "nvfp4"), _decode_groups),
}
