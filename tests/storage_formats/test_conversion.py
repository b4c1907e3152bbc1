from __future__ import annotations

import numpy as np
import pytest

from pipelines import quantize_index
from storage_formats import EdjeError, TokenStore, UsageError, codec, precisions, verify_index
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import Manifest
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


def test_damage_is_never_copied(built):
    root, _ = built
    path = Layout(root).token_shard("bf16", 1)
    data = bytearray(path.read_bytes())
    data[2 * 512 + 7] ^= 1
    path.write_bytes(data)
    with pytest.raises(EdjeError, match="row 10"):
        convert(root, ["fp8"])
    assert Manifest.load(root).spec.precisions == ("bf16",)


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
