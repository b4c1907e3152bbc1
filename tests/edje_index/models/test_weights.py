"""Weights on disk and their data types."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edje_index.errors import ModelError
from edje_index.models.devices import as_tensor, to_bf16_array
from edje_index.models.weights import assign_weights, read_weights, save_tensors


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 3)
        self.second = torch.nn.Linear(2, 3)
        self.second.weight = self.first.weight


def test_says_what_does_not_fit(tmp_path: Path) -> None:
    state = Tied().state_dict()
    with pytest.raises(ModelError, match=r"the file .* 1 tensors missing \(first.bias\)"):
        assign_weights(Tied(), {k: v for k, v in state.items() if k != "first.bias"}, "the file")
    with pytest.raises(ModelError, match=r"1 tensors unexpected \(third\)"):
        assign_weights(Tied(), {**state, "third": torch.zeros(1)}, "the file")
    with pytest.raises(ModelError, match="size mismatch"):
        assign_weights(Tied(), {**state, "first.bias": torch.zeros(4)}, "the file")
    (tmp_path / "bad.safetensors").write_bytes(b"bad")
    for path in (tmp_path / "bad.safetensors", tmp_path / "absent.safetensors"):
        for prefix in ("", "first."):
            with pytest.raises(ModelError, match="cannot read the weights"):
                read_weights(path, prefix)


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (-float("inf"), torch.bfloat16)])
def test_weights_that_are_not_finite_are_not_written(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    state = {"sound": torch.arange(3), "broken.weight": torch.tensor([1.0, value], dtype=dtype)}
    with pytest.raises(
        ModelError, match=r"tensor broken.weight of w.safetensors contains 1 values that are NaN or inf"
    ):
        save_tensors(state, tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_bfloat16_rounds_as_ml_dtypes_does_and_comes_back(values: list[float]) -> None:
    exact = np.array(values, np.float32)
    rounded = to_bf16_array(torch.from_numpy(exact))
    np.testing.assert_array_equal(rounded.astype(np.float32), exact.astype(ml_dtypes.bfloat16).astype(np.float32))
    back = as_tensor(rounded)
    assert back.dtype == torch.bfloat16
    np.testing.assert_array_equal(back.float().numpy(), rounded.astype(np.float32))
