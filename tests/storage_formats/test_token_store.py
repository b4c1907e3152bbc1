from __future__ import annotations

import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from storage_formats import (
    MissingExtraError,
    RowIdError,
    TokenStore,
    UsageError,
    read_rows,
)
from storage_formats.codecs import codec
from storage_formats.format.layout import IndexSpec, padded_shard_bytes
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.places import Directory
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import same_bits, write_random_index

SPEC = IndexSpec(37, 8, (4, 16), 6)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("index")
    return root, write_random_index(
        root, SPEC, failed=frozenset({3, 36}), duplicates=frozenset({8})
    )


@pytest.mark.parametrize(
    ("row_ids", "named"),
    [([-1], "-1"), ([37], "37"), ([0, 40, -3], r"40 \(and 1 more\)"), ([2**63], 2**63)],
)
def test_row_ids_out_of_range_are_an_index_error_that_names_the_first(
    built, row_ids, named
):
    store = TokenStore.open(built[0])
    for call in (
        store.fetch,
        store.fetch_records,
        lambda ids: list(store.iter_fetch([ids])),
        lambda ids: read_rows(built[0], ids),
        lambda ids: read_embeddings(CommittedIndex.open(built[0]), ids),
    ):
        with pytest.raises(RowIdError, match=f"row id {named} is out .* 0 to 36"):
            call(row_ids)
    assert issubclass(RowIdError, IndexError)


@pytest.mark.parametrize(
    ("row_ids", "message"),
    [
        ([0.5], r"float64 of shape \[1\]"),
        ([[1]], r"int64 of shape \[1, 1\]"),
        (np.zeros((0, 2), np.int64), r"int64 of shape \[0, 2\]"),
        (5, r"int64 of shape \[\]"),
        (["a"], "<U1"),
        ([2**70], "object"),
        ([[1], [1, 2]], "inhomogeneous"),
        (np.ones(37, np.bool_), r"bool of shape \[37\]; .* numpy.flatnonzero"),
    ],
)
def test_row_ids_that_are_not_flat_integers_are_refused(built, row_ids, message):
    with pytest.raises(UsageError, match=f"flat sequence of integers.*{message}"):
        TokenStore.open(built[0]).fetch(row_ids)


@pytest.mark.parametrize("row_ids", [(), range(0), np.array([])])
def test_no_row_ids_give_no_blocks(built, row_ids):
    store = TokenStore.open(built[0])
    assert store.fetch(row_ids).shape == (0, 4, 16)
    assert store.fetch_records(row_ids).shape == (0, store.record_bytes)
    assert read_rows(built[0], row_ids).num_rows == 0


def test_a_tensor_holds_the_same_bits_in_the_same_memory(built):
    torch = pytest.importorskip("torch")
    root, expected = built
    store = TokenStore.open(root)
    out = store.empty(3)
    # rows 3 and 36 are holes
    tensor = store.fetch([5, 3, 36], out=out, as_torch=True)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, (3, 4, 16))
    assert same_bits(tensor.view(torch.int16).numpy().view("bfloat16"), out)
    assert same_bits(out, expected[[5, 3, 36]])
    tensor[0, 0, 0] = 7.5
    assert out[0, 0, 0] == 7.5


def test_without_pytorch_a_tensor_is_refused_with_advice(built, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'edje-index\[search\]'"):
        TokenStore.open(built[0]).fetch([1], as_torch=True)


@pytest.mark.parametrize(
    "out",
    [
        np.empty((1, 4, 16), np.float32),
        np.empty((2, 4, 16), "bfloat16"),
        np.empty((1, 4, 32), "bfloat16")[:, :, ::2],
    ],
)
def test_output_of_the_wrong_type_or_shape_is_refused(built, out):
    with pytest.raises(UsageError, match="out must be"):
        TokenStore.open(built[0]).fetch([0], out=out)


def test_unknown_precision_and_absent_index_are_refused(built, tmp_path):
    with pytest.raises(UsageError, match="'fp3'; choose one of: bf16"):
        TokenStore.open(built[0], "fp3")
    with pytest.raises(UsageError, match="there is no index"):
        TokenStore.open(tmp_path / "nothing")
    with pytest.raises(UsageError, match="not an EDJE index"):
        TokenStore.open(tmp_path)


def test_opening_does_not_depend_on_the_number_of_rows(tmp_path):
    write_random_index(tmp_path, SPEC)
    layout = Directory(tmp_path)
    manifest = Manifest.load(tmp_path)
    rows = 10**9
    spec = replace(SPEC, rows=rows, shard_size=1024)
    (rows_file,) = manifest.rows_files
    replace(
        manifest,
        spec=spec,
        counts=replace(manifest.counts, inputs=rows, indexed=rows),
        shard_tables=(replace(manifest.shard_tables[0], bytes=10**8),),
        rows_files=(replace(rows_file, file=replace(rows_file.file, bytes=10**10)),),
    ).write(layout)
    # sparse files of the right lengths
    size = codec("bf16", SPEC.block_shape).record_bytes
    for shard in (0, spec.shards - 1):
        _, length = padded_shard_bytes(len(spec.shard_rows(shard)), 1024, size)
        with layout.token_shard("bf16", shard).open("ab") as file:
            file.truncate(length)
    tracemalloc.start()
    store = TokenStore.open(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) == rows
    assert peak < 1_000_000
