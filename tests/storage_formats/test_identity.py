"""Files that were exchanged with those of another shard or another index are
noticed when they are read.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_formats import (
    CorruptIndexError,
    IndexSpec,
    Manifest,
    TokenStore,
)
from storage_formats.format import shard_table
from storage_formats.format.layout import Layout
from storage_formats.format.parquet import ParquetRowGroups
from tests.conftest import same_bits, write_random_index

SPEC = IndexSpec(40, 8, (2, 8), 4, precisions=("bf16", "fp8"))
KINDS = ("tokens", "checksums")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("identity") / "index"
    return root, write_random_index(root, SPEC)


def files_of(root, shard):
    layout = Layout(root)
    return {
        "tokens": layout.token_shard("bf16", shard),
        "checksums": layout.checksums("bf16", shard),
    }


def exchange(left, right):
    moved = left.with_name("moved")
    left.rename(moved)
    right.rename(left)
    moved.rename(right)


@given(
    shards=st.lists(
        st.integers(0, SPEC.shards - 1), min_size=2, max_size=2, unique=True
    ),
    kinds=st.sets(st.sampled_from(KINDS), min_size=1),
    opened_before=st.booleans(),
)
@settings(max_examples=60)
def test_files_of_two_shards_that_were_exchanged_are_noticed(
    sound, shards, kinds, opened_before
):
    original, blocks = sound
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(original, Path(folder) / "index"))
        with TokenStore.open(root) as store:
            if opened_before:
                store.fetch(range(SPEC.rows))
                store.close()
            for kind in kinds:
                exchange(*(files_of(root, shard)[kind] for shard in shards))
            for shard in range(SPEC.shards):
                rows = SPEC.shard_rows(shard)
                exchanged = kinds if shard in shards else set()
                if exchanged & {"tokens", "checksums"}:
                    named = files_of(root, shard)[
                        "checksums" if "checksums" in exchanged else "tokens"
                    ]
                    with pytest.raises(CorruptIndexError, match=str(named)) as caught:
                        store.fetch(rows)
                    assert caught.value.row_ids == tuple(rows)
                else:
                    assert same_bits(store.fetch(rows), blocks[list(rows)])


@pytest.mark.parametrize("fetched_before", [False, True])
def test_an_index_that_is_replaced_under_an_open_store_is_noticed(
    tmp_path, fetched_before
):
    root = tmp_path / "index"
    other = tmp_path / "other"
    blocks = write_random_index(root, SPEC)
    write_random_index(other, SPEC, seed=8)
    with TokenStore.open(root) as store:
        if fetched_before:
            assert same_bits(store.fetch([1]), blocks[[1]])
        shutil.rmtree(root)
        other.rename(root)
        with pytest.raises(
            CorruptIndexError, match="replaced while the index was open"
        ):
            store.fetch(range(SPEC.rows))


def test_a_large_shard_table_is_read_in_parts(tmp_path, monkeypatch):
    # the 5 files of a shard are in two groups
    monkeypatch.setattr(shard_table, "_TABLE_GROUP_LINES", 4)
    blocks = write_random_index(tmp_path, SPEC)
    read = ParquetRowGroups.read
    groups = []
    monkeypatch.setattr(
        ParquetRowGroups,
        "read",
        lambda *arguments: (groups.append(1) or table for table in read(*arguments)),
    )
    with TokenStore.open(tmp_path) as store:
        assert same_bits(store.fetch([17]), blocks[[17]])
        # lines 10 to 14, of groups of four lines
        assert len(groups) == 2
        store.fetch([16, 23])
        assert len(groups) == 2
        assert same_bits(store.fetch(range(SPEC.rows)), blocks)


def test_another_shard_table_is_noticed(sound, tmp_path):
    root = Path(shutil.copytree(sound[0], tmp_path / "index"))
    write_random_index(tmp_path / "other", SPEC, seed=8)
    table = root / Manifest.load(root).shard_tables[0].path
    shutil.copy(
        tmp_path / "other" / Manifest.load(tmp_path / "other").shard_tables[0].path,
        table,
    )
    with (
        TokenStore.open(root) as store,
        pytest.raises(CorruptIndexError, match="is not the file that was committed"),
    ):
        store.fetch([0])
