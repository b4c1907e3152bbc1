"""Properties that all precisions share."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from pipelines import quantize_index
from storage_formats import Manifest, UsageError, codec, precisions
from storage_formats.codecs import kernel_compiler
from tests.conftest import environment, same_bits, write_arrays


def gaussian(count, shape, scale=1.0):
    rng = np.random.default_rng(5)
    return (
        rng.standard_normal((count, *shape), dtype=np.float32) * np.float32(scale)
    ).astype(ml_dtypes.bfloat16)


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
@pytest.mark.parametrize("exponent", [-30, -6, 5, 40])
def test_record_length_and_error_on_gaussian_tokens(
    name, record_bytes, bound, exponent
):
    entry = codec(name, (8, 384))
    assert entry.record_bytes == record_bytes
    if name == "nvfp4":
        # its range is small
        exponent = max(-6, min(5, exponent))
    blocks = gaussian(40, (8, 384), 2.0**exponent)
    exact = blocks.astype(np.float64)
    difference = entry.decode(entry.encode(blocks)).astype(np.float64) - exact
    error = np.linalg.norm(difference) / np.linalg.norm(exact)
    # also not better than the format allows
    assert 0.9 * bound - 1e-5 <= error <= bound


@pytest.mark.parametrize(
    ("name", "multiple"), [("mxfp4", 32), ("nvfp4", 16), ("sign1", 8)]
)
def test_width_that_cannot_be_grouped_is_refused(name, multiple):
    codec(name, (3, multiple))
    with pytest.raises(UsageError, match=f"{multiple}, .* {multiple + 4}"):
        codec(name, (3, multiple + 4))


def test_two_precisions_have_a_name_for_their_bits(tmp_path):
    names = ["2bit", "1bit"]
    blocks = np.ones((1, 1, 8), np.float32)
    write_arrays(tmp_path / "i", blocks, np.ones((1, 1)), precisions=names)
    assert Manifest.load(tmp_path / "i").spec.precisions == ("gauss2", "sign1")
    quantize_index(tmp_path / "i", drop=names[1:])
    assert Manifest.load(tmp_path / "i").spec.precisions == ("gauss2",)


@pytest.mark.parametrize("name", precisions())
def test_results_do_not_depend_on_threads(name):
    entry = codec(name, (64, 384))
    # several chunks
    blocks = gaussian(200, (64, 384))
    records = entry.encode(blocks, threads=1)
    assert (entry.encode(blocks, threads=5) == records).all()
    decoded = entry.decode(records, threads=1)
    assert same_bits(entry.decode(records, threads=5), decoded)


def test_a_kernel_that_cannot_be_cached_is_compiled():
    space: dict = {}
    # Numba caches no code without a file
    exec("def seven(numbers):\n    numbers[0] = 7", space)
    numbers = np.zeros(1, dtype=np.int64)
    kernel_compiler.kernel(kernel_compiler.output_array(kernel_compiler.types.int64))(
        space["seven"]
    )(numbers)
    assert numbers[0] == 7


USE_ALL = """
import ml_dtypes
import numpy as np
from storage_formats import codec, precisions
blocks = np.ones((1, 2, 64), ml_dtypes.bfloat16)
for name in precisions():
    entry = codec(name, (2, 64))
    entry.decode(entry.encode(blocks))
"""


def test_a_later_process_compiles_no_kernel():
    """The key of Numba's cache must not depend on the process."""
    exec(USE_ALL, {})
    done = subprocess.run(
        [sys.executable, "-c", USE_ALL],
        env={**environment(), "NUMBA_DEBUG_CACHE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "data loaded" in done.stdout
    assert "saved" not in done.stdout
