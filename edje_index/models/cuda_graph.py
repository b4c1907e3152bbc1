"""CUDA graphs: the kernels of a function on a GPU, started by one call.

Starting a kernel from Python takes longer than the kernels of a small batch run, and
needs the lock of the interpreter, which threads that decode images hold, too. On an
H100, 100 candidates took 7 ms kernel by kernel; on an H200, their record takes 2.5 ms.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TypeAlias

import torch

Tensors: TypeAlias = tuple[torch.Tensor, ...]
_Shapes: TypeAlias = tuple[tuple[torch.Size, torch.dtype], ...]
_Replay: TypeAlias = tuple[torch.cuda.CUDAGraph, Tensors, Tensors]

_MAX_GRAPHS = 16


class CudaGraphs:
    """Callable that does the same as `function`. Thread-safe.

    On a GPU, the kernels of a call are recorded once for all calls with inputs of the
    same shapes. Elsewhere, `function` is called.

    Args:
        function: function of tensors on `device`, without gradients and without a wait
            for the device.
        device: where `function` computes. The inputs of a call may be elsewhere.
        records_at: number of the call, among those with inputs of the same shapes, that
            is recorded. Recording takes longer than a call.
    """

    def __init__(
        self,
        function: Callable[..., Tensors],
        device: torch.device,
        *,
        records_at: int = 1,
    ) -> None:
        self._function = function
        self._device = device
        self._records_at = records_at
        self._lock = threading.Lock()
        self._calls: dict[_Shapes, int] = {}
        # None: this function cannot be recorded
        self._graphs: dict[_Shapes, _Replay | None] = {}

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        if self._device.type != "cuda":
            return self._function(*inputs)
        shapes = tuple((each.shape, each.dtype) for each in inputs)
        with self._lock, torch.cuda.device(self._device):
            self._calls[shapes] = self._calls.get(shapes, 0) + 1
            if self._calls[shapes] == self._records_at:
                if len(self._graphs) == _MAX_GRAPHS:
                    oldest = next(iter(self._graphs))
                    del self._graphs[oldest], self._calls[oldest]
                self._graphs[shapes] = self._record(inputs)
            replay = self._graphs.get(shapes)
            if replay is None:
                return self._function(*self._there(inputs))
            graph, places, results = replay
            for place, each in zip(places, inputs, strict=True):
                place.copy_(each, non_blocking=True)
            graph.replay()
            # the next call writes over the results
            return tuple(each.clone() for each in results)

    def _there(self, inputs: Tensors) -> Tensors:
        return tuple(each.to(self._device, non_blocking=True) for each in inputs)

    def _record(self, inputs: Tensors) -> _Replay | None:
        places = tuple(each.clone() for each in self._there(inputs))
        # loads libraries and compiles kernels, which is not possible in a record
        self._function(*places)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may go on to allocate memory
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = self._function(*places)
        except RuntimeError as error:
            warnings.warn(
                "the GPU is slower than it could be, because its kernels cannot be"
                f" recorded: {str(error)[:200]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return graph, places, results
