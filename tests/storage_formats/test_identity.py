"""Files that were exchanged with those of another shard or another index are
noticed when they are read.
"""

from __future__ import annotations

import shutil

import pytest

from storage_formats import (
    CorruptIndexError,
    IndexSpec,
    TokenStore,
)
from storage_formats.format import shard_table
from storage_formats.format.layout import Layout
from storage_formats.format.parquet import ParquetRowGroups
from tests.conftest import same_bits, write_random_index

SPEC = IndexSpec(40, 8, (2, 8), 4, precisions=("bf16", "fp8"))


def path_of(root, kind, shard):
    layout = Layout(root)
    if kind == "tokens":
        return layout.token_shard("bf16", shard)
    return layout.checksums("bf16", shard)


@pytest.mark.parametrize("kinds", [["tokens"], ["checksums"], ["tokens", "checksums"]])
@pytest.mark.parametrize("opened_before", [False, True])
def test_files_of_two_shards_that_were_exchanged_are_noticed(
    sound, index, kinds, opened_before
):
    root = index[0]
    with TokenStore.open(root) as store:
        if opened_before:
            store.fetch(range(SPEC.rows))
            store.close()
        for kind in kinds:
            for shard, other in ((1, 3), (3, 1)):
                source = path_of(sound[0], kind, other)
                shutil.copy(source, path_of(root, kind, shard))
        for shard in range(SPEC.shards):
            rows = SPEC.shard_rows(shard)
            if shard in (1, 3):
                named = str(path_of(root, kinds[-1], shard))
                with pytest.raises(CorruptIndexError, match=named) as caught:
                    store.fetch(rows)
                assert caught.value.row_ids == tuple(rows)
            else:
                assert same_bits(store.fetch(rows), sound[1][list(rows)])


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
