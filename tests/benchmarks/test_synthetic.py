from __future__ import annotations

import numpy as np
import pytest

from benchmarks.synthetic import make_synthetic
from storage_formats import TokenStore, UsageError, verify_index
from storage_formats.format.layout import IndexSpec

SPEC = IndexSpec(rows=300, shard_size=128, block_shape=(4, 16), embed_dim=8)


def test_synthetic_index_is_sound_and_repeatable(tmp_path):
    steps = []
    manifest = make_synthetic(tmp_path / "a", SPEC, on_progress=lambda *step: steps.append(step))
    make_synthetic(tmp_path / "b", SPEC)
    make_synthetic(tmp_path / "c", SPEC, seed=1)
    assert steps == [("writing shards", shard, 3) for shard in (1, 2, 3)]
    assert manifest.counts.indexed == 300
    assert verify_index(tmp_path / "a") == []
    a, b, c = (TokenStore.open(tmp_path / name).fetch(range(300)).view(np.uint16) for name in "abc")
    assert (a == b).all()
    assert (a != c).mean() > 0.9


def test_folder_in_use_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        make_synthetic(tmp_path, SPEC)
