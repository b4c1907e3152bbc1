"""The compiled kernels equal the NumPy reference bit for bit, for every code, scale
and value.
"""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage_formats import codec, precisions
from tests.conftest import same_bits
from tests.storage_formats import codec_reference as reference

BF16 = ml_dtypes.bfloat16
GROUPED = {"fp8": 32, "mxfp4": 32, "nvfp4": 16}
COMPILED = [name for name in precisions() if name != "bf16"]


def assert_encodes_alike(entry, blocks):
    np.testing.assert_array_equal(entry.encode(blocks), reference.encode(entry, blocks))


def assert_decodes_alike(entry, records):
    assert same_bits(entry.decode(records), reference.decode(entry, records))


@pytest.mark.parametrize("name", COMPILED)
def test_encodes_every_number_as_the_largest_of_its_group(name):
    """Every largest magnitude is tested with the rule for scales."""
    entry = codec(name, (64, 32))
    bits = np.arange(0x10000, dtype=np.uint16)
    group = GROUPED.get(name, 32)
    below = np.random.default_rng(0).integers(0, 0x8000, (len(bits), group)) % (
        (bits & 0x7FFF)[:, None] + 1
    )
    blocks = below.astype(np.uint16) | (
        np.arange(group, dtype=np.uint16) % 2 << np.uint16(15)
    )
    blocks[:, 5] = bits
    assert_encodes_alike(entry, blocks.reshape(-1, 64, 32).view(BF16))


def groups_of_every_number(largest, group):
    """For each magnitude (bits, [k]), groups that start with it, of all bfloat16 up
    to it: uint16 [k, n, group].
    """
    numbers = np.arange(0x10000, dtype=np.uint16)
    numbers = np.resize(numbers, (-(-len(numbers) // (group - 1)), group - 1))
    numbers = np.broadcast_to(numbers, (len(largest), *numbers.shape))
    kept = np.where((numbers & 0x7FFF) <= largest[:, None, None], numbers, np.uint16(0))
    first = np.broadcast_to(largest[:, None, None], (*kept.shape[:2], 1))
    return np.concatenate([first, kept], axis=-1)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize(
    "step", [0x400 + 3, pytest.param(1 << 5, marks=pytest.mark.slow)]
)
def test_encodes_every_number_under_scales_of_the_whole_range(name, step):
    entry = codec(name, (1, GROUPED.get(name, 32)))
    for first in range(0, 0x7F80, 8 * step):
        largest = np.append(
            np.arange(first, min(first + 8 * step, 0x7F80), step), 0x7F7F
        ).astype(np.uint16)
        blocks = groups_of_every_number(largest, entry.block_shape[1])
        assert_encodes_alike(entry, blocks.reshape(-1, *entry.block_shape).view(BF16))


@pytest.mark.parametrize("name", COMPILED)
@settings(max_examples=30)
@given(data=st.data())
def test_any_bits_of_any_shape(name, data):
    multiple = 1 if name in ("fp8", "int8") else 32
    width = multiple * data.draw(st.integers(1, 288 // multiple))
    entry = codec(name, (data.draw(st.integers(1, 5)), width))
    count = data.draw(st.integers(0, 4))
    bits = data.draw(
        hnp.arrays(
            np.uint16, (count, *entry.block_shape), elements=st.integers(0, 0xFFFF)
        )
    )
    assert_encodes_alike(entry, bits.view(BF16))
    records = data.draw(
        hnp.arrays(np.uint8, (count, entry.record_bytes), elements=st.integers(0, 255))
    )
    assert_decodes_alike(entry, records)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (4, 32)) for name in COMPILED),
        # a block may have an odd number of values
        ("int8", (3, 31)),
        ("fp8", (3, 31)),
        # kernels have loops for whole pieces of a token, and for the rest
        ("nvfp4", (3, 80)),
        ("mxfp4", (3, 96)),
        ("sign1", (3, 88)),
    ],
)
def test_an_offset_is_subtracted_and_added_in_float32(name, shape):
    rng = np.random.default_rng(5)
    offset = rng.standard_normal(shape, dtype=np.float32)
    blocks = (rng.standard_normal((21, *shape), dtype=np.float32) + offset).astype(BF16)
    blocks[3, 1, 2] = np.nan
    plain = codec(name, shape)
    entry = codec(name, shape, offset)
    residuals = blocks.astype(np.float32) - offset
    if name != "int8":
        residuals = residuals.astype(BF16)
    records = entry.encode(blocks)
    np.testing.assert_array_equal(records, reference.encode(plain, residuals))
    expected = reference.decode(plain, records, offset)
    for threads in (None, 1):
        assert same_bits(entry.decode(records, threads=threads), expected)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", ["none", "random", "zeros", "any magnitude"])
def test_decodes_every_code_under_every_scale(name, kind):
    """With offsets of zero, of both signs, and of very different magnitudes."""
    rng = np.random.default_rng(6)
    records, shape = reference.every_code(name)
    anything = rng.integers(0, 256, (50, records.shape[1]), dtype=np.uint8)
    # without NaN, subnormal codes and extreme scales, for which the kernel of E4M3 has
    # a faster path
    plain = anything | 8
    plain[anything & 0x7F == 0x7F] = 0x20
    plain[:, -shape[0] * shape[1] // 32 :] %= 130
    plain[:, -shape[0] * shape[1] // 32 :] += 3
    numbers = rng.standard_normal(shape).astype(np.float32)
    offset = {
        "none": None,
        "random": numbers,
        "zeros": np.copysign(np.zeros_like(numbers), numbers),
        "any magnitude": np.ldexp(numbers, rng.integers(-148, 100, shape)),
    }[kind]
    entry = codec(name, shape, offset)
    for each in (records, anything, plain):
        expected = reference.decode(entry, each, offset)
        assert same_bits(entry.decode(each, threads=1), expected)


FLUSHED = """
import sys
import numpy as np
import torch
assert torch.set_flush_denormal(True)
from storage_formats import codec
from tests.storage_formats.codec_reference import every_code

for name in sys.argv[2:]:
    records, shape = every_code(name)
    bits = np.arange(0x10000, dtype=np.uint16).reshape(-1, *shape)
    saved = {"decoded": codec(name, shape).decode(records).view(np.uint16)}
    saved["encoded"] = codec(name, shape).encode(bits.view("bfloat16"))
    np.savez(f"{sys.argv[1]}/{name}", **saved)
"""


@pytest.mark.slow
def test_flushing_subnormal_numbers_to_zero_changes_no_bits(tmp_path):
    """The tables of a codec are computed in the process, so they count as well."""
    command = [sys.executable, "-c", FLUSHED, str(tmp_path), *COMPILED]
    subprocess.run(command, check=True)
    for name in COMPILED:
        records, shape = reference.every_code(name)
        saved = np.load(tmp_path / f"{name}.npz")
        entry = codec(name, shape)
        assert same_bits(saved["decoded"].view(BF16), reference.decode(entry, records))
        blocks = np.arange(0x10000, dtype=np.uint16).reshape(-1, *shape).view(BF16)
        assert (saved["encoded"] == reference.encode(entry, blocks)).all(), name
