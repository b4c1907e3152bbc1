"""Kernels for functions of large tensors on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from edje_index.models.devices import fused_on_cuda

# all that the decorator reads of a tensor
ON_GPU = SimpleNamespace(device=torch.device("cuda"), size=2)
SMALL_ON_GPU = SimpleNamespace(device=torch.device("cuda"), size=1)


def compiled_as(kernel, monkeypatch):
    """Let torch compile functions to `kernel`. Return a function of large tensors, and
    the calls of the compiler.
    """
    calls = []

    def compiler(function, dynamic):
        calls.append(dynamic)
        return kernel

    monkeypatch.setattr(torch, "compile", compiler)
    work = fused_on_cuda(lambda x: x.size > 1, dynamic=True)(
        lambda x: f"plain {x.size}"
    )
    return work, calls


def test_only_large_tensors_on_a_gpu_are_compiled(monkeypatch):
    work, calls = compiled_as(lambda x: f"kernel {x.size}", monkeypatch)
    on_cpu = SimpleNamespace(device=torch.device("cpu"), size=2)
    assert [work(each) for each in (on_cpu, SMALL_ON_GPU)] == ["plain 2", "plain 1"]
    assert not calls
    assert [work(ON_GPU), work(ON_GPU)] == ["kernel 2"] * 2
    # once
    assert calls == [True]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        # is no missing compiler
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_without_a_compiler_the_function_runs_as_it_is(monkeypatch, error):
    runs = []

    def kernel(x):
        runs.append(x)
        raise error

    work, _ = compiled_as(kernel, monkeypatch)
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            work(ON_GPU)
        return
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
        assert work(ON_GPU) == "plain 2"
    assert work(ON_GPU) == "plain 2"
    # it is not tried again
    assert len(runs) == 1
