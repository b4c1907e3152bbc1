"""The workers of a training run: a single process, or all processes of a torch process group."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class WorkerGroup:
    """The rank of this worker, and operations that involve all workers of a training run.

    All workers must call these methods in the same order.

    Attributes:
        rank: rank of this worker, counted from 0. Worker 0 writes the checkpoints and the log.
        size: number of workers.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def of_process_group(cls) -> WorkerGroup:
        """Describe the default torch process group. If there is none, return a group with one worker."""
        if not distributed.is_available() or not distributed.is_initialized():
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    def wrap(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Wrap `module` so that gradients are averaged over the workers."""
        if self.size == 1:
            return module
        return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return True if `flag` is True on at least one worker."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag), device=device)
        distributed.all_reduce(value, distributed.ReduceOp.MAX)
        return bool(value.item())

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Average each scalar in `values` over the workers."""
        stacked = torch.stack([value.detach().float() for value in values.values()])
        if self.size > 1:
            distributed.all_reduce(stacked)
            stacked /= self.size
        return dict(zip(values, stacked.tolist(), strict=True))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all workers, in rank order. Gradients flow back to the worker that the rows come from.

        All workers have the same number of rows.
        """
        if self.size == 1:
            return rows
        parts: tuple[torch.Tensor, ...] = all_gather(rows.contiguous())  # type: ignore[no-untyped-call]
        return torch.cat(parts)

    def barrier(self) -> None:
        """Wait until all workers call this method."""
        if self.size > 1:
            distributed.barrier()


def postponed_exchange(module: nn.Module, postponed: bool) -> AbstractContextManager[None]:
    """Return a context manager. If `postponed` is True, workers exchange no gradients while the context is active."""
    if postponed and isinstance(module, DistributedDataParallel):
        context: AbstractContextManager[None] = module.no_sync()
        return context
    return nullcontext()
