"""Comparison of the formats with other implementations: ml_dtypes, torch and
torchao.
"""

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


def test_fp8_equals_the_casts_of_ml_dtypes_and_torch_under_its_scale():
    torch = pytest.importorskip("torch")
    entry = codec("fp8", (8, 384))
    blocks = tokens()
    codes, scales = np.split(entry.encode(blocks), [8 * 384], axis=1)
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    quotients = blocks.astype(np.float32) / factors
    largest = np.abs(quotients).max(axis=-1)
    assert ((largest > 224) & (largest <= 448))[
        blocks.astype(np.float32).any(axis=-1)
    ].all()
    assert (
        codes.reshape(blocks.shape)
        == quotients.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    ).all()
    cast = torch.from_numpy(quotients).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (codes.reshape(blocks.shape) == cast).all()
    product = (
        codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(blocks.shape)
        * factors
    )
    # exact
    assert (entry.decode(entry.encode(blocks)).astype(np.float32) == product).all()


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
