"""Training on captioned clips with both strategies of the paper, then a build and a search with the trained bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edje_index import TokenIndex
from edje_index.bundles.bundle import ModelBundle
from edje_index.models.adapter import TEMPORAL, TemporalAdapter
from edje_index.models.devices import as_tensor
from pipelines import build_index, train
from storage_formats import TokenStore, UsageError
from tests.edje_index.clip_cases import LOSSLESS, clip, panned

pytestmark = pytest.mark.slow
FRAMES = 3


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """A caption for each of eight files. Seven are clips."""
    (tmp_path / "clips").mkdir()
    lines = []
    for number in range(8):
        path = tmp_path / "clips" / f"{number}.mkv"
        path.write_bytes(clip(panned(6 + 5 * number, 48, 32), LOSSLESS) if number != 6 else b"no clip")
        lines.append(json.dumps({"image": path.name, "captions": [f"clip number {number}"]}) + "\n")
    (tmp_path / "captions.jsonl").write_text("".join(lines))
    return tmp_path / "captions.jsonl"


def settings(model: Path, clips: Path, kind: str) -> dict[str, Any]:
    return {
        "inputs": {"model": str(model), "images": str(clips)},
        "architecture": {"adapter": kind, "frames": FRAMES, "tokens": 4, "adapter_hidden": 48},
        "alignment": {"steps": 2, "batch_size": 4},
        "loop": {"steps": 3, "batch_size": 4},
        "run": {"threads": 1},
    }


@pytest.mark.parametrize("kind", TEMPORAL)
def test_a_trained_temporal_adapter_indexes_clips(kind: str, captions: Path, tiny_bundle: Path) -> None:
    folder = captions.parent
    result = train(captions, folder / "model", **settings(tiny_bundle, folder / "clips", kind))
    assert result.images == 7
    trained, start = ModelBundle.load(folder / "model"), ModelBundle.load(folder / "model.run/start")
    assert isinstance(trained.adapter, TemporalAdapter)
    assert isinstance(start.adapter, TemporalAdapter)
    assert not torch.equal(trained.adapter.position, start.adapter.position)
    if trained.adapter.frame_adapter is not None:
        image = ModelBundle.load(tiny_bundle).adapter
        for name, weights in trained.adapter.frame_adapter.state_dict().items():
            assert torch.equal(weights, image.state_dict()[name])
    arguments = (folder / "clips", folder / "clips.edje", folder / "model")
    with pytest.raises(UsageError, match="was trained on 3 frames per clip, not on 8"):
        build_index(*arguments, engine="inline", threads=1, max_failed=1.0, frames=8)
    build_index(*arguments, engine="inline", threads=1, max_failed=1.0, frames=FRAMES)
    rows = [0, 1, 2, 3, 4, 5, 7]
    features = as_tensor(TokenStore.open(folder / "model.run/features.edje").fetch(rows))
    with torch.no_grad():
        expected = trained.adapter(features.float()).numpy()
    stored = TokenStore.open(folder / "clips.edje").fetch(rows).astype(np.float32)
    np.testing.assert_allclose(stored, expected, atol=0.01)  # the features are rounded to bfloat16
    assert np.abs(stored[0] - stored[1]).max() > 0
    assert len(TokenIndex.open(folder / "clips.edje", model=folder / "model").search("clip number 3", k=3)) == 3
