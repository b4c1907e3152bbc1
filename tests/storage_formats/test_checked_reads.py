"""Blocks are compared with their checksums when they are read."""

from __future__ import annotations

import itertools
import os
import shutil

import numpy as np
import pytest

from storage_formats import CorruptIndexError, TokenStore, UsageError, codec
from storage_formats.format.checksum import crc32c_rows
from storage_formats.format.layout import Layout
from storage_formats.reading import loops, memory, records
from storage_formats.reading.files import ShardFiles
from tests.conftest import same_bits
from tests.storage_formats.reading_cases import ALL, SPEC, flip

FLIPS = 40


@pytest.fixture
def index(built, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(built[0], tmp_path / "index")
    return tmp_path / "index"


def token_path(root, precision, shard):
    return Layout(root).token_shard(
        precision, shard, len(codec(precision, SPEC.block_shape).record_shape)
    )


def damage_row(root, precision, row_id):
    shard, position = divmod(row_id, SPEC.shard_size)
    size = codec(precision, SPEC.block_shape).record_bytes
    flip(token_path(root, precision, shard), position * size + 5)


@pytest.mark.parametrize("precision", SPEC.precisions)
def test_every_flipped_byte_is_reported_or_lies_in_padding(index, whole, precision):
    rng = np.random.default_rng(SPEC.precisions.index(precision))
    size = codec(precision, SPEC.block_shape).record_bytes
    reported = 0
    with TokenStore.open(index, precision) as store:
        for _ in range(FLIPS):
            shard = int(rng.integers(SPEC.shards))
            path = token_path(index, precision, shard)
            offset = int(rng.integers(path.stat().st_size))
            bit = int(rng.integers(8))
            flip(path, offset, bit)
            rows = SPEC.shard_rows(shard)
            if offset < len(rows) * size:
                row_id = rows[offset // size]
                with pytest.raises(CorruptIndexError, match=str(path)) as caught:
                    store.fetch(rows, check="always")
                assert caught.value.row_ids == (row_id,)
                reported += 1
            else:
                blocks = store.fetch(rows, check="always")
                assert same_bits(blocks, whole[precision][list(rows)])
            flip(path, offset, bit)
        assert same_bits(store.fetch(range(SPEC.rows)), whole[precision])
    assert reported > FLIPS // 2


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_every_engine_checks_blocks_and_records(index, whole, precision, engine):
    damage_row(index, precision, 70)
    with TokenStore.open(index, precision, engine) as store:
        for read in (store.fetch, store.fetch_records):
            for ids in ([70], [70, 71, 70], range(SPEC.rows), range(0, SPEC.rows, 5)):
                with pytest.raises(CorruptIndexError, match="row 70 is") as raised:
                    read(ids)
                assert raised.value.remedy == "verify"
        sound = [row for row in range(SPEC.rows) if row != 70]
        assert same_bits(store.fetch(sound), whole[precision][sound])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65, 200, 13_824])
def test_memory_is_copied_and_checked(compiled, size, monkeypatch):
    if compiled and not loops.has_crc_instruction():
        pytest.skip("no CRC-32C instruction here")
    monkeypatch.setattr(records, "_loops", lambda _: loops if compiled else None)
    for count, bypasses in itertools.product((1, 2, 3, 10), (False, True)):
        data = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
        sources = data.ctypes.data + np.arange(count) * size
        assert (records.checksums_at(sources, size) == crc32c_rows(data)).all()
        for order in (np.arange(count), np.arange(count)[::-1]):
            target = memory.aligned_bytes((count + 1) * size).reshape(count + 1, size)
            records.copy_records(sources, target, order, bypasses=bypasses)
            assert (target[order] == data).all()
            assert not target[count].any()


@pytest.mark.parametrize("read", ["fetch", "fetch_records", "max_sim"])
@pytest.mark.parametrize("precision", SPEC.precisions)
def test_checked_records_of_maps_need_no_file(index, precision, read, monkeypatch):
    ids = np.random.default_rng(0).integers(0, SPEC.rows, 100)
    query = np.ones((2, SPEC.block_shape[1]), np.float32)
    with TokenStore.open(index, precision, "mapped") as store:
        method = getattr(store, read)
        arguments = [query, ids] if read == "max_sim" else [ids]
        expected = method(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(ShardFiles, "acquire", None)
            assert np.array_equal(method(*arguments), expected, equal_nan=True)
        # a row that was not read yet, and closed maps, need files again
        other = next(row for row in range(SPEC.rows) if row not in ids)
        store.fetch([other])
        store.close()
        assert np.array_equal(method(*arguments), expected, equal_nan=True)
        os.truncate(token_path(index, precision, 0), 100)
        with pytest.raises(CorruptIndexError, match="shortened from"):
            method(*arguments)


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_mapped_records_are_checked_once_unless_always_is_asked(
    index, whole, precision, engine
):
    with TokenStore.open(index, precision, engine) as store:
        store.fetch(range(64, 100))
        assert same_bits(store.fetch([70, 101]), whole[precision][[70, 101]])
        damage_row(index, precision, 70)
        damage_row(index, precision, 110)
        with pytest.raises(CorruptIndexError, match="row 110 is damaged"):
            store.fetch(range(105, 115))
        with pytest.raises(CorruptIndexError, match="row 70 is damaged"):
            store.fetch([70, 71], check="always")
        # the records of another store are checked again
        with (
            TokenStore.open(index, precision, engine) as other,
            pytest.raises(CorruptIndexError, match="row 70 is damaged"),
        ):
            other.fetch([70])
        with pytest.raises(UsageError, match="check must be"):
            store.fetch([70], check="never")
