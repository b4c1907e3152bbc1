"""The operations in which all workers of a training run take part."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.nn.functional import all_gather
from torch.nn.utils import parameters_to_vector, vector_to_parameters

# Time limit of operations in the patient group. It is long, because the other workers
# wait while worker 0 computes features or evaluates.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class WorkerGroup:
    """The rank of this worker, and operations that involve all workers of a training
    run.

    All workers must call these methods in the same order.

    Attributes:
        rank: rank of this worker, counted from 0. Worker 0 writes the checkpoints and
            the log.
        size: number of workers.
        patient: process group of the same workers, with a time limit of 30 days; None
            for one worker.
    """

    rank: int = 0
    size: int = 1
    patient: distributed.ProcessGroup | None = None

    def any(self, flag: bool) -> bool:
        """Wait until all workers have called this method. Return True if `flag` is
        True on at least one worker.
        """
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag))
        distributed.all_reduce(value, distributed.ReduceOp.MAX, group=self.patient)
        return bool(value.item())

    def mean(self, values: dict[str, Tensor]) -> dict[str, float]:
        """Average each scalar in `values` over the workers."""
        stacked = torch.stack([value.detach().float() for value in values.values()])
        if self.size > 1:
            distributed.all_reduce(stacked)
            stacked /= self.size
        return dict(zip(values, stacked.tolist(), strict=True))

    def average(self, gradients: list[Tensor]) -> None:
        """Average each of the `gradients` over the workers, in place."""
        if self.size == 1:
            return
        flat = parameters_to_vector(gradients)
        distributed.all_reduce(flat)
        vector_to_parameters(flat / self.size, gradients)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all workers, in rank order. The gradient of a row is sent
        back to the worker that passed the row.

        All workers must pass the same number of rows.
        """
        if self.size == 1:
            return rows
        return torch.cat(all_gather(rows.contiguous()))  # type: ignore


ALONE = WorkerGroup()
"""The group of a training run with one worker."""


def patient_group() -> Any:
    """Return a new process group of all workers. Its operations may wait for 30
    days.
    """
    return distributed.new_group(backend="gloo", timeout=_PATIENCE)
