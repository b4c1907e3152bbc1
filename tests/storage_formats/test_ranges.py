"""Values that an index cannot hold are refused at the door, and those that it can hold
keep their meaning.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import ml_dtypes
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


def write(root: Path, blocks: Any, *, precision: str = "bf16") -> None:
    write_arrays(root, blocks, NUMBERS[:, 0, :8], precisions=[precision])


@pytest.mark.parametrize("exponent", [-30, -20, -14, -10, -5, 0, 5, 10, 15, 20, 40])
@pytest.mark.parametrize("precision", precisions())
def test_a_token_is_stored_well_or_refused(
    tmp_path: Path, precision: str, exponent: int
) -> None:
    blocks = NUMBERS * np.float32(2.0**exponent)
    root = tmp_path / "i.edje"
    low, high = codec(precision, SHAPE).form.token_range
    largest = np.abs(blocks).max(axis=2)
    if largest.min() < low or largest.max() > high:
        assert precision == "nvfp4"
        with pytest.raises(UsageError, match=r"row \d: .* is .*; scale the tokens"):
            write(root, blocks, precision=precision)
        return
    write(root, blocks, precision=precision)
    found = TokenStore.open(root).fetch(range(6)).astype(np.float32)
    wrong = np.linalg.norm(found - blocks, axis=2) / np.linalg.norm(blocks, axis=2)
    assert wrong.max() < ERRORS.get(precision, 0.02)


@pytest.mark.parametrize("size", [1000.0, 1e-5])
def test_a_conversion_that_loses_tokens_keeps_its_source(
    tmp_path: Path, size: float
) -> None:
    root = tmp_path / "i.edje"
    blocks = NUMBERS.copy()
    # one token of many
    blocks[4, 2] *= np.float32(size)
    write(root, blocks)
    with pytest.raises(EdjeError, match=r"row 4: .* token 2 is .* nvfp4 can store"):
        quantize_index(root, to=["nvfp4"], drop=["bf16"])
    store = TokenStore.open(root)
    assert store.precision == "bf16"
    assert len(store.fetch([4])) == 1


def test_a_token_of_zeros_is_in_every_range(tmp_path: Path) -> None:
    blocks = NUMBERS.copy()
    blocks[1, 1] = 0
    write(tmp_path / "i.edje", blocks, precision="nvfp4")
    assert not TokenStore.open(tmp_path / "i.edje").fetch([1])[0, 1].any()
    assert codec("nvfp4", SHAPE).form.token_range[1] == 336


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("is_list", [False, True])
def test_the_writer_takes_tensors(tmp_path: Path, name: str, is_list: bool) -> None:
    blocks = torch.from_numpy(NUMBERS).to(getattr(torch, name)).requires_grad_()
    write(tmp_path / "t.edje", list(blocks) if is_list else blocks)
    numbers = blocks.detach().float().numpy()
    write(tmp_path / "n.edje", numbers.astype(getattr(ml_dtypes, name, name)))
    tokens = [TokenStore.open(tmp_path / f"{each}.edje") for each in "tn"]
    assert np.array_equal(*(each.fetch(range(6)).view(np.uint16) for each in tokens))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_a_query_that_is_not_finite_is_refused(
    tmp_path: Path, bad: float, kind: Any
) -> None:
    write(tmp_path / "i.edje", NUMBERS)
    add_ann(tmp_path / "i.edje")
    search = LateInteractionSearch.open(tmp_path / "i.edje")
    query = NUMBERS[0, :2].copy()
    embedding = NUMBERS[0, 0, :8].copy()
    wrong = query.copy()
    wrong[1, 3] = bad
    wrong_embedding = embedding.copy()
    wrong_embedding[5] = bad
    assert len(search.search(kind(query.tolist()), 3, row_ids=[0, 1, 2])) == 3
    with pytest.raises(UsageError, match="query has a value that is NaN or infinite"):
        search.search(kind(wrong.tolist()), embedding=embedding)
    with pytest.raises(UsageError, match="embedding has a value that is NaN"):
        search.search(query, embedding=kind(wrong_embedding.tolist()))
    with pytest.raises(UsageError, match="query has a value that is NaN"):
        search.store.max_sim(wrong, [0])


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (np.float32(1.5), 1.5),
        (np.uint64(7), 7),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array(4), 4),
        (np.array(["a", "b"]), ["a", "b"]),
        (torch.tensor(3), 3),
        (
            np.datetime64("2024-05-01T10:00:00", "ns"),
            datetime.datetime(2024, 5, 1, 10, tzinfo=datetime.UTC),
        ),
        (np.datetime64("NaT", "s"), None),
        (pandas.NaT, None),
        (pa.scalar(["a", "b"]), ["a", "b"]),
        (pa.scalar(None, pa.int64()), None),
    ],
    ids=repr,
)
def test_a_value_of_numpy_keeps_its_type(given: Any, stored: Any) -> None:
    values = source_values({"column": given}, Ignored())
    assert (values or {}).get("column") == stored
    assert type((values or {}).get("column")) is type(stored)
