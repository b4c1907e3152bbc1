"""Values that an index cannot hold are refused at the door, and those that it can hold
keep their meaning.
"""

from __future__ import annotations

import datetime

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch

from edje_index import LateInteractionSearch, add_ann, quantize_index
from pipelines.metadata import Ignored, source_values
from storage_formats import EdjeError, TokenStore, UsageError, precisions
from storage_formats.codecs import codec
from tests.conftest import write_arrays

SHAPE = (4, 32)
NUMBERS = np.random.default_rng(0).standard_normal((6, *SHAPE)).astype(np.float32)
# relative errors of docs/quantize.md, with room for small samples
ERRORS = {
    "fp8": 0.05,
    "mxfp4": 0.3,
    "nvfp4": 0.2,
    "gauss2": 0.55,
    "sign1": 0.7,
}


def write(root, blocks, precision="bf16"):
    write_arrays(root, blocks, NUMBERS[:, 0, :8], precisions=[precision])


@pytest.mark.parametrize("exponent", [-30, -10, -5, 0, 5, 10, 40])
@pytest.mark.parametrize("precision", precisions())
def test_a_token_is_stored_well_or_refused(tmp_path, precision, exponent):
    blocks = NUMBERS * np.float32(2.0**exponent)
    low, high = codec(precision, SHAPE).form.token_range
    largest = np.abs(blocks).max(axis=2)
    if largest.min() < low or largest.max() > high:
        assert precision == "nvfp4"
        with pytest.raises(UsageError, match=r"row \d: .* scale the tokens"):
            write(tmp_path / "i", blocks, precision)
        return
    write(tmp_path / "i", blocks, precision)
    stored = TokenStore.open(tmp_path / "i").fetch(range(6)).astype(np.float32)
    errors = np.linalg.norm(stored - blocks, axis=2) / np.linalg.norm(blocks, axis=2)
    assert errors.max() < ERRORS.get(precision, 0.02)


@pytest.mark.parametrize("factor", [1000.0, 1e-5])
def test_a_conversion_that_loses_tokens_keeps_its_source(tmp_path, factor):
    blocks = NUMBERS.copy()
    # one token of many
    blocks[4, 2] *= np.float32(factor)
    write(tmp_path / "i", blocks)
    with pytest.raises(EdjeError, match=r"row 4: .* token 2 is .* nvfp4 can store"):
        quantize_index(tmp_path / "i", to=["nvfp4"], drop=["bf16"])
    assert TokenStore.open(tmp_path / "i").precision == "bf16"


def test_a_token_of_zeros_is_in_every_range(tmp_path):
    blocks = NUMBERS.copy()
    blocks[1, 1] = 0
    write(tmp_path / "i", blocks, "nvfp4")
    assert not TokenStore.open(tmp_path / "i").fetch([1])[0, 1].any()
    assert codec("nvfp4", SHAPE).form.token_range[1] == 336


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", [list, torch.Tensor.detach])
def test_the_writer_takes_tensors(tmp_path, name, kind):
    blocks = torch.from_numpy(NUMBERS).to(getattr(torch, name))
    write(tmp_path / "i", kind(blocks.requires_grad_()))
    stored = TokenStore.open(tmp_path / "i").fetch(range(6), as_torch=True)
    assert torch.equal(stored, blocks.bfloat16())


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_a_query_that_is_not_finite_is_refused(tmp_path, bad, kind):
    write(tmp_path / "i", NUMBERS)
    add_ann(tmp_path / "i")
    search = LateInteractionSearch.open(tmp_path / "i")
    query = NUMBERS[0, :2].tolist()
    embedding = NUMBERS[0, 0, :8].tolist()
    assert len(search.search(kind(query), 3, embedding=kind(embedding))) == 3
    wrong = [query[0], [bad, *query[1][1:]]]
    with pytest.raises(UsageError, match="query has a value that is NaN"):
        search.search(kind(wrong), embedding=embedding)
    with pytest.raises(UsageError, match="embedding has a value that is NaN"):
        search.search(query, embedding=kind([bad, *embedding[1:]]))
    with pytest.raises(UsageError, match="query has a value that is NaN"):
        search.store.max_sim(wrong, [0])


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (np.float32(1.5), 1.5),
        (np.uint64(7), 7),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array(["a", "b"]), ["a", "b"]),
        (torch.tensor(3), 3),
        (
            np.datetime64("2024-05-01T10:00:00", "ns"),
            datetime.datetime(2024, 5, 1, 10, tzinfo=datetime.UTC),
        ),
        (np.datetime64("NaT", "s"), None),
        (pandas.NaT, None),
        (pa.scalar(["a", "b"]), ["a", "b"]),
    ],
    ids=repr,
)
def test_a_value_of_numpy_keeps_its_type(given, stored):
    value = (source_values({"column": given}, Ignored()) or {}).get("column")
    assert value == stored
    assert type(value) is type(stored)
