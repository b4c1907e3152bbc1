"""Checkpoints in the format of the published training code."""

import json

import pytest
import torch
from safetensors.torch import load_file

from edje_index import load_published_checkpoint
from edje_index.errors import ModelError
from tests.conftest import REPO
from tests.edje_index.published_cases import (
    Case,
    write_case,
)

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", ["compressed_small", "local_small"])
def test_golden_case(name):
    """Outputs of the authors' own code."""
    folder = REPO / "tests" / "golden" / name
    case = json.loads((folder / "case.json").read_text())
    expected = load_file(folder / "expected.safetensors")
    model = load_published_checkpoint(
        folder / "checkpoint.pth",
        folder / "tokenizer",
        vision_heads=case["vision_heads"],
        layer_norm_eps=case["layer_norm_eps"],
    )
    tokens = model.adapter(expected["vision_tokens"])
    torch.testing.assert_close(
        tokens, expected["adapter_output"], atol=TOLERANCE, rtol=0
    )
    scores = model.score(case["captions"], expected["adapter_output"])
    torch.testing.assert_close(scores, expected["logits"], atol=TOLERANCE, rtol=0)
    inputs = model.joint.tokenizer.inputs(case["captions"], tokens.shape[1])
    for field in ("input_ids", "token_type_ids", "attention_mask"):
        assert torch.equal(getattr(inputs, field), expected[field])


def test_says_what_is_missing_or_does_not_fit(tmp_path):
    case = Case()
    state = write_case(tmp_path, case)
    tokenizer = tmp_path / "tokenizer"
    torch.save([1, 2], tmp_path / "other.pth")
    with pytest.raises(ModelError, match="is not a checkpoint"):
        load_published_checkpoint(tmp_path / "other.pth", tokenizer, vision_heads=3)
    for name in (
        "vision_projection.value.bias",
        "language_model.bert.encoder.layer.1.output.dense.weight",
    ):
        torch.save(
            {"model": {k: v for k, v in state.items() if k != name}},
            tmp_path / "part.pth",
        )
        with pytest.raises(ModelError, match="1 tensors missing"):
            load_published_checkpoint(tmp_path / "part.pth", tokenizer, vision_heads=3)
    torch.save(
        {"model": {k: v for k, v in state.items() if "vision_projection" not in k}},
        tmp_path / "part.pth",
    )
    with pytest.raises(ModelError, match="adapter: missing"):
        load_published_checkpoint(tmp_path / "part.pth", tokenizer, vision_heads=3)
    wide = state | {"vision_projection.projection.weight": torch.zeros(20, 24)}
    torch.save(
        {"model": wide | {"vision_projection.projection.bias": torch.zeros(20)}},
        tmp_path / "part.pth",
    )
    with pytest.raises(
        ModelError, match="width 20, but the joint encoder reads tokens of width 16"
    ):
        load_published_checkpoint(tmp_path / "part.pth", tokenizer, vision_heads=3)
