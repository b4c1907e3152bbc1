"""Properties that all precisions share."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numba
import numpy as np
import pytest

from pipelines import quantize_index
from storage_formats import Manifest, UsageError, codec, precisions
from storage_formats.codecs import fill_record, kernel_compiler
from tests.conftest import REPO, same_bits, write_arrays

BF16 = ml_dtypes.bfloat16
SHAPE = (6, 64)
EVERY = pytest.mark.parametrize("name", precisions())
COMPILED = pytest.mark.parametrize(
    "name", [name for name in precisions() if name != "bf16"]
)


def gaussian(
    count: int, shape: tuple[int, int] = SHAPE, scale: float = 1.0
) -> np.ndarray:
    rng = np.random.default_rng(5)
    return (
        rng.standard_normal((count, *shape), dtype=np.float32) * np.float32(scale)
    ).astype(BF16)


def relative_error(blocks: np.ndarray, decoded: np.ndarray) -> float:
    exact = blocks.astype(np.float64)
    return float(
        np.linalg.norm(decoded.astype(np.float64) - exact) / np.linalg.norm(exact)
    )


def every_finite_number() -> np.ndarray:
    """All finite bfloat16 values; each token holds 64 consecutive ones: [k, 6, 64]."""
    numbers = np.arange(0x10000, dtype=np.uint16).view(BF16)
    finite = numbers[np.isfinite(numbers.astype(np.float32))]
    return np.resize(finite, (-(-len(finite) // 384), *SHAPE))


@pytest.mark.parametrize(
    ("name", "record_bytes", "bound"),
    [
        ("bf16", 6144, 0.0),
        ("fp8", 3080, 0.0275),
        ("int8", 3088, 0.0080),
        ("nvfp4", 1728, 0.0965),
        ("mxfp4", 1632, 0.117),
        ("gauss2", 784, 0.345),
        ("sign1", 400, 0.61),
    ],
)
@pytest.mark.parametrize("scale", [2.0**-6, 1.0, 2.0**5])
def test_record_length_and_error_on_gaussian_tokens(name, record_bytes, bound, scale):
    entry = codec(name, (8, 384))
    assert entry.record_bytes == record_bytes
    blocks = gaussian(40, (8, 384), scale)
    error = relative_error(blocks, entry.decode(entry.encode(blocks)))
    # also not better than the format allows
    assert 0.9 * bound - 1e-5 <= error <= bound


@EVERY
def test_finite_blocks_decode_to_finite_blocks(name):
    entry = codec(name, SHAPE)
    blocks = every_finite_number()
    shuffled = (
        np.random.default_rng(2).permutation(blocks.reshape(-1)).reshape(blocks.shape)
    )
    for given_blocks in (blocks, shuffled):
        assert np.isfinite(
            entry.decode(entry.encode(given_blocks)).astype(np.float32)
        ).all()


@EVERY
def test_the_fill_record_is_a_block_of_nan(name):
    entry = codec(name)
    record = fill_record(entry)
    assert (entry.encode(np.full((1, 64, 384), np.nan, dtype=BF16)) == record).all()
    assert np.isnan(entry.decode(record).astype(np.float32)).all()


@COMPILED
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_turn_their_group_into_nan(name, value):
    entry = codec(name, SHAPE)
    blocks = gaussian(1)
    clean = entry.decode(entry.encode(blocks))
    blocks[0, 2, 21] = value
    decoded = entry.decode(entry.encode(blocks))
    shared = {
        "nvfp4": slice(16, 32),
        "mxfp4": slice(0, 32),
    }
    expected = clean.view(np.uint16).copy()
    expected[0, 2, shared.get(name, slice(None))] = 0x7FC0
    assert same_bits(decoded, expected.view(BF16))


@pytest.mark.parametrize(
    ("name", "multiple"), [("mxfp4", 32), ("nvfp4", 16), ("sign1", 8)]
)
def test_width_that_cannot_be_grouped_is_refused(name, multiple):
    assert codec(name, (3, multiple)).record_bytes > 0
    with pytest.raises(
        UsageError, match=rf"multiple of {multiple}, but the width is {multiple + 4}"
    ):
        codec(name, (3, multiple + 4))


def test_two_precisions_have_a_name_for_their_bits(tmp_path):
    names = ["2bit", "1bit"]
    assert [codec(name).name for name in names] == ["gauss2", "sign1"]
    write_arrays(
        tmp_path / "i",
        np.ones((1, 1, 8), np.float32),
        np.ones((1, 1)),
        precisions=names,
    )
    quantize_index(tmp_path / "i", drop=names[1:])
    assert Manifest.load(tmp_path / "i").spec.precisions == ("gauss2",)


@EVERY
def test_results_do_not_depend_on_threads(name):
    entry = codec(name, (64, 384))
    # several chunks
    blocks = gaussian(200, (64, 384))
    records = entry.encode(blocks, threads=1)
    decoded = entry.decode(records, threads=1)
    for count in (2, 5):
        assert (entry.encode(blocks, threads=count) == records).all()
        assert same_bits(entry.decode(records, threads=count), decoded)


def test_a_kernel_that_cannot_be_cached_is_compiled():
    space: dict = {}
    # Numba caches no code without a file
    exec("def seven(numbers):\n    numbers[0] = 7", space)
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(space["seven"])
    numbers = np.zeros(1, dtype=np.int64)
    kernel_compiler.kernel(kernel_compiler.output_array(kernel_compiler.types.int64))(
        space["seven"]
    )(numbers)
    assert numbers[0] == 7


def test_a_later_process_compiles_no_kernel():
    """The key of Numba's cache must not depend on the process."""
    script = """
import ml_dtypes
import numpy as np
from storage_formats import codec, precisions
blocks = np.ones((1, 2, 64), ml_dtypes.bfloat16)
for name in precisions():
    entry = codec(name, (2, 64))
    entry.decode(entry.encode(blocks))
"""
    environment = {**os.environ, "NUMBA_DEBUG_CACHE": "1", "PYTHONPATH": str(REPO)}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    assert "data loaded" in done.stdout
    assert "saved" not in done.stdout
