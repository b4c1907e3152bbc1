"""The workers of one training: this process alone, or the members of an existing torch process group."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class WorkerGroup:
    """The group of train workers, seen from one of them. Every worker has to call each of the collective methods.

    Attributes:
        rank: number of this worker. Worker 0 writes checkpoints and the log.
        size: number of workers.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def of_process_group(cls) -> WorkerGroup:
        """The default process group, or a group of one if there is none."""
        if not distributed.is_available() or not distributed.is_initialized():
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    def wrap(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The module with its gradients averaged over the workers."""
        if self.size == 1:
            return module
        return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether `flag` is true on any worker."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag), device=device)
        distributed.all_reduce(value, distributed.ReduceOp.MAX)
        return bool(value.item())

    def mean(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Mean of each scalar over the workers."""
        stacked = torch.stack([value.detach().float() for value in values.values()])
        if self.size > 1:
            distributed.all_reduce(stacked)
            stacked /= self.size
        return dict(zip(values, stacked.tolist(), strict=True))

    def barrier(self) -> None:
        """Wait for all workers."""
        if self.size > 1:
            distributed.barrier()


def postponed_exchange(module: nn.Module, postponed: bool) -> AbstractContextManager[None]:
    """A context in which gradients are summed locally instead of exchanged, if `postponed`."""
    if postponed and isinstance(module, DistributedDataParallel):
        context: AbstractContextManager[None] = module.no_sync()
        return context
    return nullcontext()
