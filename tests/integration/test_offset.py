"""The offset block of an index, from `quantize` to every later change."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from edje_index import ModelBundle, ModelError
from edje_index.bundles.info import OFFSET_FILE, read_bundle_offset
from edje_index.fetching.device_fetcher import DeviceFetcher
from pipelines import (
    append_index,
    build_index,
    compact_index,
    copy_index,
    delete_rows,
    merge_indexes,
    quantize_index,
    repair_index,
)
from pipelines.jobs.snapshots import remove_snapshots, roll_back
from storage_formats import (
    CorruptIndexError,
    TokenStore,
    UsageError,
    codec,
    verify_index,
)
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import Manifest
from tests.conftest import same_bits, write_arrays
from tests.integration.builds import contents, make_photos
from tests.pipelines.conftest import stop_after_one_shard
from tests.storage_formats.reading_cases import flip

SHAPE = (4, 32)


def write(root, mean, *, rows=50, seed=0):
    """Write an index in bf16 whose tokens have the mean block `mean`."""
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((rows, *SHAPE), dtype=np.float32) + mean
    write_arrays(
        root, blocks, rng.standard_normal((rows, 4), dtype=np.float32), shard_size=16
    )
    return blocks


@pytest.fixture
def root(tmp_path):
    mean = np.random.default_rng(9).standard_normal(SHAPE, dtype=np.float32)
    write(tmp_path / "a", mean)
    return tmp_path / "a"


def test_quantize_subtracts_the_mean_of_stored_rows(root):
    quantize_index(root, ["nvfp4", "gauss2"])
    assert verify_index(root) == []
    assert Manifest.load(root).spec.offset.precisions == ("nvfp4", "gauss2")
    exact = TokenStore.open(root, "bf16").fetch(range(50))
    plain = codec("nvfp4", SHAPE)
    store = TokenStore.open(root, "nvfp4")
    mean = exact.astype(np.float64).mean(axis=0).astype(np.float32)
    np.testing.assert_array_equal(store.offset, mean)
    with_offset, without = (
        np.linalg.norm(blocks.astype(np.float32) - exact.astype(np.float32))
        for blocks in (store.fetch(range(50)), plain.decode(plain.encode(exact)))
    )
    assert with_offset < 0.8 * without
    fetched = DeviceFetcher(store, "cpu").fetch([3, 7])
    assert (fetched == store.fetch([3, 7], as_torch=True)).all()


@pytest.mark.parametrize(("mean", "rows"), [(0.05, 50), (3.0, 20)])
def test_tokens_without_a_mean_and_few_tokens_get_no_offset(tmp_path, mean, rows):
    write(tmp_path, mean, rows=rows)
    quantize_index(tmp_path, ["sign1"])
    assert Manifest.load(tmp_path).spec.offset is None
    assert not Layout(tmp_path).offset_values.exists()


def test_a_resumed_conversion_gives_the_same_bytes(root, tmp_path):
    shutil.copytree(root, tmp_path / "b")
    quantize_index(root, ["sign1"])
    stop_after_one_shard(quantize_index, tmp_path / "b", ["sign1"])
    quantize_index(tmp_path / "b", ["sign1"])
    assert contents(root) == contents(tmp_path / "b")


def test_later_changes_keep_the_offset(root, tmp_path):
    quantize_index(root, ["nvfp4"])
    offset = TokenStore.open(root, "nvfp4").offset
    delete_rows(root, rows=range(25))
    # the rows that are left have another mean
    quantize_index(root, ["sign1"])
    np.testing.assert_array_equal(TokenStore.open(root, "sign1").offset, offset)
    compact_index(root, tmp_path / "dense")
    copy_index(tmp_path / "dense", tmp_path / "copy")
    left = TokenStore.open(root, "nvfp4").fetch(range(25, 50))
    for each in (tmp_path / "dense", tmp_path / "copy"):
        store = TokenStore.open(each, "nvfp4")
        np.testing.assert_array_equal(store.offset, offset)
        assert same_bits(store.fetch(range(25)), left)
        assert verify_index(each) == []
    quantize_index(root, drop=["nvfp4", "sign1"])
    assert Manifest.load(root).spec.offset is None
    assert verify_index(root) == []


def test_a_kept_snapshot_keeps_its_bytes(root):
    quantize_index(root, ["nvfp4"])
    before = TokenStore.open(root, "nvfp4").fetch(range(50))
    delete_rows(root, rows=[0])
    quantize_index(root, [], drop=["nvfp4"])
    quantize_index(root, ["nvfp4"])
    assert verify_index(root) == []
    roll_back(root, 0)
    assert same_bits(TokenStore.open(root, "nvfp4").fetch(range(50)), before)


def test_only_indexes_with_the_same_offset_are_merged(root, tmp_path):
    shutil.copytree(root, tmp_path / "same")
    write(tmp_path / "other", 2.0, seed=1)
    for each in (root, tmp_path / "same", tmp_path / "other"):
        quantize_index(each, ["nvfp4"], drop=["bf16"])
    merge_indexes([root, tmp_path / "same"], tmp_path / "merged")
    assert verify_index(tmp_path / "merged") == []
    with pytest.raises(UsageError, match="offset block"):
        merge_indexes([root, tmp_path / "other"], tmp_path / "refused")


def test_a_damaged_offset_is_an_error(root):
    quantize_index(root, ["nvfp4"])
    flip(Layout(root).offset_values, 5)
    assert [problem.path for problem in verify_index(root)] == ["tokens/offset/c.0.0"]
    with pytest.raises(CorruptIndexError, match=r"offset block .* is not the file"):
        TokenStore.open(root, "nvfp4")
    assert len(TokenStore.open(root, "bf16").fetch([1])) == 1


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_the_sample_restores_a_lost_offset(root, how):
    quantize_index(root, ["nvfp4"])
    delete_rows(root, rows=range(25))
    before = contents(root)
    path = Layout(root).offset_values
    if how == "lost":
        path.unlink()
    else:
        flip(path, 5)
    flip(root / "tokens/nvfp4/c.1.0", 5)
    result = repair_index(root)
    assert [(file.path, file.source) for file in result.repaired] == [
        ("tokens/offset/c.0.0", "precision bf16"),
        ("tokens/nvfp4/c.1.0", "precision bf16"),
    ]
    assert result.left == ()
    assert contents(root) == before


def test_an_offset_that_nothing_gives_is_named(root):
    quantize_index(root, ["nvfp4"])
    quantize_index(root, drop=["bf16"])
    remove_snapshots(root, 1)
    Layout(root).offset_values.unlink()
    result = repair_index(root)
    assert result.repaired == ()
    (lost,) = [each for each in result.left if each.code == "offset-lost"]
    assert "nvfp4" in lost.message


def test_a_bundle_gives_its_offset_to_new_indexes(tmp_path, tiny_bundle):
    make_photos(tmp_path / "photos", 10)
    bundle = ModelBundle.load(tiny_bundle)
    rng = np.random.default_rng(0)
    offset = rng.standard_normal(bundle.block_shape, dtype=np.float32)
    model = tmp_path / "model"
    info = replace(bundle, offset=offset).save(model)
    # it does not change what the towers and the adapter compute
    assert info.encoder_fingerprint == bundle.info.encoder_fingerprint
    np.testing.assert_array_equal(read_bundle_offset(info), offset)
    options = {"engine": "inline", "shard_size": 4, "precisions": ["nvfp4", "bf16"]}
    for each, root in ((tiny_bundle, "a"), (model, "b")):
        build_index(tmp_path / "photos", tmp_path / root, each, **options)
    assert Manifest.load(tmp_path / "a").spec.offset is None
    entry = codec("nvfp4", bundle.block_shape, offset)
    exact = TokenStore.open(tmp_path / "a", "bf16").fetch(range(10))
    root = tmp_path / "b"
    make_photos(tmp_path / "more", 3)
    append_index(root, tmp_path / "more", model=model, engine="inline")
    assert verify_index(root) == []
    store = TokenStore.open(root, "nvfp4")
    np.testing.assert_array_equal(store.offset, offset)
    assert same_bits(store.fetch(range(10)), entry.decode(entry.encode(exact)))
    Layout(root).offset_values.unlink()
    assert [each.source for each in repair_index(root).repaired] == ["the model bundle"]
    assert verify_index(root) == []
    flip(model / OFFSET_FILE, -1)
    with pytest.raises(ModelError, match=r"offset\.safetensors has changed"):
        ModelBundle.load(model)


def test_no_conversion_replaces_the_files_of_a_kept_snapshot(root):
    exact = TokenStore.open(root, "bf16").fetch(range(1, 50))
    for does_roll_back in (True, False):
        delete_rows(root, rows=[0])
        quantize_index(root, ["int8"], drop=["bf16"])
        with pytest.raises(UsageError, match=r"snapshot 0 .* tokens in 'bf16'"):
            quantize_index(root, ["bf16"], source="int8")
        if does_roll_back:
            roll_back(root, 0)
            assert same_bits(TokenStore.open(root, "bf16").fetch(range(1, 50)), exact)
            assert verify_index(root) == []
    remove_snapshots(root, 1)
    quantize_index(root, ["bf16"], source="int8")
    made, source = (
        TokenStore.open(root, name).fetch(range(1, 50)) for name in ("bf16", "int8")
    )
    assert same_bits(made, source)


def test_refresh_reads_a_precision_that_was_dropped_and_made_again(root):
    quantize_index(root, ["nvfp4"])
    exact = TokenStore.open(root, "bf16").fetch(range(50))
    store = TokenStore.open(root, "nvfp4")
    store.fetch(range(50))
    quantize_index(root, [], drop=["nvfp4"])
    delete_rows(root, rows=range(0, 50, 3))
    remove_snapshots(root, 1)
    # the mean of fewer rows
    quantize_index(root, ["nvfp4"])
    before = store.offset
    store.refresh()
    assert not np.array_equal(store.offset, before)
    entry = codec("nvfp4", SHAPE, store.offset)
    kept = [row for row in range(50) if row % 3]
    assert same_bits(store.fetch(kept), entry.decode(entry.encode(exact[kept])))
