"""Checkpoints in the format of the published training code, which are refused."""

import pytest
import torch

from edje_index import load_published_checkpoint
from edje_index.errors import ModelError
from tests.edje_index.published_cases import Case, write_case


def test_says_what_is_missing_or_does_not_fit(tmp_path):
    state = write_case(tmp_path, Case())

    def without(part):
        return {key: value for key, value in state.items() if part not in key}

    wide = {"weight": torch.zeros(20, 24), "bias": torch.zeros(20)}
    wide = {f"vision_projection.projection.{key}": wide[key] for key in wide}
    for content, message in (
        ([1, 2], "is not a checkpoint"),
        *(
            ({"model": without(name)}, "1 tensors missing")
            for name in (
                "vision_projection.value.bias",
                "language_model.bert.encoder.layer.1.output.dense.weight",
            )
        ),
        ({"model": without("vision_projection")}, "missing: vision_projection"),
        (
            {"model": state | wide},
            "width 20, but the joint encoder reads tokens of width 16",
        ),
    ):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(ModelError, match=message):
            load_published_checkpoint(
                tmp_path / "other.pth", tmp_path / "tokenizer", vision_heads=3
            )
