from __future__ import annotations

import numpy as np
import pytest
import tensorstore as ts
import zarr

from pipelines import quantize_index
from storage_formats import CorruptIndexError, EdjeError, TokenStore, UsageError, codec, precisions, verify_index
from storage_formats.errors import TaskInterrupted
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.rows import read_index_rows
from storage_formats.writing.conversion import (
    ConversionTask,
    convert_shard,
    with_precisions,
)
from tests.conftest import same_bits, write_random_index

SPEC = IndexSpec(rows=21, shard_size=8, block_shape=(4, 64), embed_dim=6)
HOLES = frozenset({3, 8, 20})
TARGETS = tuple(name for name in precisions() if name != "bf16")


def convert(root, targets, source="bf16"):
    quantize_index(root, targets, source=source)


@pytest.fixture
def built(tmp_path):
    return tmp_path, write_random_index(tmp_path, SPEC, failed=HOLES)


def test_every_precision_holds_the_records_of_its_codec(built):
    root, expected = built
    convert(root, TARGETS)
    assert verify_index(root) == []
    assert not Layout(root).build.exists()
    kept = np.array([row for row in range(SPEC.rows) if row not in HOLES])
    for name in TARGETS:
        entry = codec(name, SPEC.block_shape)
        with TokenStore.open(root, name) as store:
            blocks = store.fetch(range(SPEC.rows))
        assert same_bits(blocks[kept], entry.decode(entry.encode(expected[kept])))
        assert set(np.flatnonzero(store.holes(blocks))) == HOLES


@pytest.mark.parametrize("name", TARGETS)
def test_stock_readers_return_the_records(built, name):
    root, expected = built
    convert(root, [name])
    entry = codec(name, SPEC.block_shape)
    kept = np.array([row for row in range(SPEC.rows) if row not in HOLES])
    path = str(root / "tokens" / name)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    for values in (zarr.open_array(path, mode="r")[...], ts.open(spec, read=True).result().read().result()):
        values = np.ascontiguousarray(values)
        assert (values[kept].view(np.uint8).reshape(len(kept), -1) == entry.encode(expected[kept])).all()
        assert (values[sorted(HOLES)] == entry.fill_value).all()


def test_building_a_precision_and_converting_to_it_give_the_same_bytes(tmp_path):
    from dataclasses import replace

    write_random_index(tmp_path / "both", replace(SPEC, precisions=("bf16", "nvfp4")), failed=HOLES)
    write_random_index(tmp_path / "one", SPEC, failed=HOLES)
    convert(tmp_path / "one", ["nvfp4"])
    for path in sorted((tmp_path / "both").rglob("*nvfp4*/*")):
        other = tmp_path / "one" / path.relative_to(tmp_path / "both")
        assert path.read_bytes() == other.read_bytes(), path


def test_damage_is_never_copied(built):
    root, _ = built
    path = Layout(root).token_shard("bf16", 1)
    data = bytearray(path.read_bytes())
    data[2 * 512 + 7] ^= 1
    path.write_bytes(data)
    with pytest.raises(EdjeError, match="row 10"):
        convert(root, ["fp8"])
    assert Manifest.load(root).spec.precisions == ("bf16",)


def test_index_is_readable_and_sound_while_it_is_converted(built):
    root, expected = built
    Layout(root).staging.mkdir(parents=True)
    convert_shard(ConversionTask(str(root), 1, SPEC, "bf16", ("fp8",), "plan"))
    assert verify_index(root) == []
    assert same_bits(TokenStore.open(root).fetch(range(21)), expected)
    with pytest.raises(CorruptIndexError, match="3 shards need one receipt each, but there are receipts for 0"):
        with_precisions(CommittedIndex.open(root), ["fp8"], [], source="bf16")


def test_stopping_leaves_nothing_behind(built):
    root, _ = built
    Layout(root).staging.mkdir(parents=True)
    task = ConversionTask(str(root), 0, SPEC, "bf16", ("fp8",), "plan")
    with pytest.raises(TaskInterrupted):
        convert_shard(task, should_stop=lambda: True)
    assert list(Layout(root).staging.iterdir()) == []


def test_dropping_a_precision(built):
    root, expected = built
    convert(root, ["fp8"])
    (root / "tokens/mine").mkdir()
    assert quantize_index(root, drop=["bf16"]).precisions == ("fp8",)
    assert verify_index(root) == []
    assert {path.name for path in (root / "tokens").iterdir()} == {"zarr.json", "fp8", "mine"}
    assert [path.name for path in (root / "checksums").iterdir()] == ["fp8"]
    with pytest.raises(UsageError, match=r"would leave .* without tokens"):
        quantize_index(root, drop=["fp8"])
    entry = codec("fp8", SPEC.block_shape)
    kept = np.array([row for row in range(SPEC.rows) if row not in HOLES])
    assert same_bits(TokenStore.open(root, "fp8").fetch(kept), entry.decode(entry.encode(expected[kept])))


def test_what_was_opened_before_a_conversion_is_read_after_it(built):
    root, expected = built
    opened = CommittedIndex.open(root)
    with TokenStore(opened) as store:
        convert(root, ["fp8"])
        assert same_bits(store.fetch(range(SPEC.rows)), expected)
        assert read_index_rows(opened)["row_id"].to_pylist() == list(range(SPEC.rows))
    assert verify_index(root) == []
