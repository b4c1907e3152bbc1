"""Kernels for functions of large tensors on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edje_index.models.devices import fused_on_cuda

# all that the decorator reads of a tensor
ON_GPU: Any = SimpleNamespace(device=torch.device("cuda"), size=2)
SMALL_ON_GPU: Any = SimpleNamespace(device=torch.device("cuda"), size=1)


def decorated() -> Any:
    return fused_on_cuda(lambda x: x.size > 1, dynamic=True)(
        lambda x: f"plain {x.size}"
    )


def test_only_large_tensors_on_a_gpu_are_compiled(
    monkeypatch,
):
    compiled = []

    def compiler(function: Any, dynamic: bool) -> Any:
        compiled.append(dynamic)
        return lambda x: f"kernel {x.size}"

    monkeypatch.setattr(torch, "compile", compiler)
    work = decorated()
    on_cpu = SimpleNamespace(device=torch.device("cpu"), size=2)
    assert [work(each) for each in (on_cpu, SMALL_ON_GPU)] == ["plain 2", "plain 1"]
    assert not compiled
    assert [work(ON_GPU), work(ON_GPU)] == ["kernel 2"] * 2
    assert compiled == [True], "once"


def test_without_a_compiler_the_function_runs_as_it_is(
    monkeypatch,
):
    calls = []

    def kernel(x: Any) -> str:
        calls.append(x)
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: kernel)
    work = decorated()
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
        assert work(ON_GPU) == "plain 2"
    assert work(ON_GPU) == "plain 2"
    assert len(calls) == 1, "and is not tried again"


def test_too_little_memory_is_no_missing_compiler(
    monkeypatch,
):
    def kernel(_: Any) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: kernel)
    with pytest.raises(torch.OutOfMemoryError):
        decorated()(ON_GPU)
