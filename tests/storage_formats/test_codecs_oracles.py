"""Comparison of MXFP4 with another implementation, torchao."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from storage_formats import codec

BF16 = ml_dtypes.bfloat16


def tokens():
    """Gaussian tokens of magnitudes 2 ** -40 to 2 ** 40, with zeros, equal groups
    and outliers: bf16 [100, 8, 384].
    """
    rng = np.random.default_rng(11)
    numbers = rng.standard_normal((100, 8, 384), dtype=np.float32)
    numbers *= np.exp2(rng.integers(-40, 41, (100, 8, 1))).astype(np.float32)
    numbers[0] = 0
    numbers[1] = 448
    numbers[2:20, :, ::57] *= 50
    return numbers.astype(BF16)


def test_mxfp4_equals_torchao():
    torch = pytest.importorskip("torch")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    blocks = tokens()
    flat = torch.from_numpy(blocks.view(np.int16)).view(torch.bfloat16)
    scales, codes = mx.to_mx(flat, torch.float4_e2m1fn_x2, 32)
    theirs = [
        part.contiguous().view(torch.uint8).numpy().reshape(len(blocks), -1)
        for part in (codes, scales)
    ]
    ours = codec("mxfp4", (8, 384)).encode(blocks)
    assert (ours == np.concatenate(theirs, axis=1)).all()
