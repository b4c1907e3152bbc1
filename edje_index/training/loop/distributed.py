"""The group of one training: this process alone, or the members of a torch process group that is there already."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class WorkerGroup:
    """Which part of the training this process is.

    Attributes:
        rank: 0 writes checkpoints and logs.
        size: number of workers.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def of_process_group(cls) -> WorkerGroup:
        """The default process group's, where there is one."""
        if not distributed.is_available() or not distributed.is_initialized():
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    def wrap(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The module with its gradients averaged over the group."""
        if self.size == 1:
            return module
        return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether it is true on any rank; every rank must ask."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag), device=device)
        distributed.all_reduce(value, distributed.ReduceOp.MAX)
        return bool(value.item())

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Each scalar's mean over the group; every rank must ask."""
        stacked = torch.stack([value.detach().float() for value in values.values()])
        if self.size > 1:
            distributed.all_reduce(stacked)
            stacked /= self.size
        return dict(zip(values, stacked.tolist(), strict=True))

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            distributed.barrier()


def postponed_exchange(module: nn.Module, postponed: bool) -> AbstractContextManager[None]:
    """Within it gradients are summed up locally, where `postponed`."""
    if postponed and isinstance(module, DistributedDataParallel):
        context: AbstractContextManager[None] = module.no_sync()
        return context
    return nullcontext()
