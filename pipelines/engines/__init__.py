"""Execution engines: ways to run independent tasks on long-lived workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.engines.base import Engine


def open_engine(name: str, workers: int | None, *, cpus: int = 1, gpus: int = 0, address: str | None = None) -> Engine:
    """Return the execution engine `name`: "inline" or "ray".

    The other arguments configure `RayEngine`. The inline engine ignores these arguments.

    Raises:
        UsageError: `address` does not have the form host:port.
    """
    if name == "inline":
        from pipelines.engines.inline import InlineEngine

        return InlineEngine()
    from pipelines.engines.ray_engine import RayEngine

    return RayEngine(workers, cpus=cpus, gpus=gpus, address=address)
