"""Connects the workers of a training run in a process group, and defines the operations
in which all workers take part.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.nn.functional import all_gather
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from storage_formats.errors import EdjeError, UsageError

# Time limit of operations in the patient group. It is long, because the other workers
# wait while worker 0 computes features or evaluates.
_PATIENCE = timedelta(days=30)


def is_worker() -> bool:
    """Return True if `torchrun`, or a launcher with its environment variables,
    started this process.
    """
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True)
class WorkerGroup:
    """The rank of this worker, and operations that involve all workers of a training
    run.

    All workers must call these methods in the same order.

    Attributes:
        rank: rank of this worker, counted from 0. Worker 0 writes the checkpoints and
            the log.
        on_machine: number of workers on the machine of this worker.
        size: number of workers.
        patient: process group of the same workers, with a time limit of 30 days; None
            for one worker.
    """

    rank: int = 0
    size: int = 1
    on_machine: int = 1
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

    def share(self, value: Any) -> Any:
        """Return the `value` of worker 0. The other workers wait for this value, for up
        to 30 days.

        Raises:
            EdjeError: another worker ended before all workers called this method.
        """
        box = [value]
        try:
            distributed.broadcast_object_list(box, group=self.patient)
        except RuntimeError as error:
            raise EdjeError(
                f"another worker has ended, and its message says why: {error}"
            ) from error
        return box[0]


def patient_group() -> Any:
    """Return a new process group of all workers. Its operations may wait for 30
    days.
    """
    return distributed.new_group(backend="gloo", timeout=_PATIENCE)


@contextlib.contextmanager
def joined_group(device: torch.device) -> Iterator[WorkerGroup]:
    """Join the process group that the environment variables of `torchrun` describe, and
    leave it on exit.

    Args:
        device: device of the training run. On CUDA, each worker uses the device whose
            number is the rank of the worker on its machine, ``LOCAL_RANK``.

    Raises:
        UsageError: the environment variables are wrong, or the other workers cannot be
            reached.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        distributed.init_process_group(backend, rank=rank, world_size=size)
    except (ValueError, RuntimeError) as error:
        variables = "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        raise UsageError(
            f"cannot join the other workers: {error}; set {variables} as torchrun does"
        ) from error
    try:
        yield WorkerGroup(
            rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), patient_group()
        )
    finally:
        distributed.destroy_process_group()
