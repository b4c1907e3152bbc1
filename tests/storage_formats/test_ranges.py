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
from tests.conftest import same_bits, write_arrays

SHAPE = (4, 32)
NUMBERS = np.random.default_rng(0).standard_normal((6, *SHAPE)).astype(np.float32)


def write(root, blocks, *names):
    write_arrays(root, blocks, NUMBERS[:, 0, :8], precisions=names or ["bf16"])


@pytest.mark.parametrize("exponent", [-30, 10, 40])
def test_tokens_of_any_magnitude_are_stored_except_in_nvfp4(tmp_path, exponent):
    blocks = NUMBERS * np.float32(2.0**exponent)
    with pytest.raises(UsageError, match=r"row \d: .* scale the tokens"):
        write(tmp_path / "refused", blocks, "nvfp4")
    names = [name for name in precisions() if name != "nvfp4"]
    write(tmp_path / "i", blocks, *names)
    for name in names:
        stored = TokenStore.open(tmp_path / "i", name).fetch(range(6))
        entry = codec(name, SHAPE)
        expected = entry.decode(entry.encode(blocks.astype(stored.dtype)))
        assert same_bits(stored, expected)


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
