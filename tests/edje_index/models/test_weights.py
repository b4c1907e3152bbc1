"""Weights on disk and their data types."""

import errno
import zipfile

import pytest
import torch

from edje_index.errors import ModelError
from edje_index.models.weights import (
    assign_weights,
    read_checkpoint,
    read_weights,
    save_tensors,
    save_weights,
)
from tests.conftest import largest_file


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 3)
        self.second = torch.nn.Linear(2, 3)
        self.second.weight = self.first.weight


def test_says_what_does_not_fit(tmp_path):
    state = Tied().state_dict()
    with pytest.raises(
        ModelError, match=r"the file .* 1 tensors missing \(first.bias\)"
    ):
        assign_weights(
            Tied(), {k: v for k, v in state.items() if k != "first.bias"}, "the file"
        )
    with pytest.raises(ModelError, match=r"1 tensors unexpected \(third\)"):
        assign_weights(Tied(), {**state, "third": torch.zeros(1)}, "the file")
    with pytest.raises(ModelError, match="size mismatch"):
        assign_weights(Tied(), {**state, "first.bias": torch.zeros(4)}, "the file")
    (tmp_path / "bad.safetensors").write_bytes(b"bad")
    for path in (tmp_path / "bad.safetensors", tmp_path / "absent.safetensors"):
        for prefix in ("", "first."):
            with pytest.raises(ModelError, match="cannot read the weights"):
                read_weights(path, prefix)


def test_only_tensors_that_fit_are_taken_without_a_copy(tmp_path):
    module = torch.nn.Linear(2, 3)
    save_weights(module, tmp_path / "weights.safetensors")
    state = read_weights(tmp_path / "weights.safetensors")
    state["bias"] = state["bias"].half()
    loaded = torch.nn.Linear(2, 3)
    assign_weights(loaded, state, "the file")
    assert loaded.weight.data_ptr() == state["weight"].data_ptr()
    assert loaded.bias.dtype == torch.float32
    assert loaded.weight.requires_grad
    # a change of the mapped weights does not reach the file
    with torch.no_grad():
        loaded.weight.zero_()
    again = read_weights(tmp_path / "weights.safetensors")
    assert torch.equal(again["weight"], module.weight)


def test_shared_tensors_stay_shared():
    state = Tied().state_dict()
    del state["second.weight"]
    loaded = Tied()
    assign_weights(loaded, state, "the file")
    assert loaded.second.weight is loaded.first.weight
    assert torch.equal(loaded.second.weight, state["first.weight"])


def test_integers_are_no_weights():
    module = torch.nn.Linear(2, 2)
    state = {name: part.int() for name, part in module.state_dict().items()}
    with pytest.raises(ModelError, match=r"weight of x has the data type torch\.int32"):
        assign_weights(module, state, "x")


def test_an_error_of_the_disk_keeps_its_number(tmp_path):
    with largest_file(1000), pytest.raises(OSError, match="File too large") as raised:
        save_tensors({"a": torch.zeros(1000)}, tmp_path / "a.safetensors")
    assert raised.value.errno == errno.EFBIG


def test_checkpoints_that_take_more_memory_than_their_file_are_refused(tmp_path):
    path = tmp_path / "small.pth"
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "large.pth")
    with zipfile.ZipFile(tmp_path / "large.pth") as large:
        members = {name: large.read(name) for name in large.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as small:
        for name, content in members.items():
            small.writestr(name, content)
    with pytest.raises(ModelError, match="damaged or compressed"):
        read_checkpoint(path)
    # A pickle may call `bytearray(size)`.
    torch.save({"a": bytearray(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match="damaged or compressed"):
        read_checkpoint(path)
