"""Devices by name, and the threads of the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from edje_index.errors import ModelError


def resolve_device(device: str) -> torch.device:
    """The device that a name stands for.

    Raises:
        ModelError: no such device, or no CUDA here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"unknown device {device!r}: give auto, cpu, cuda or cuda:N") from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"no device {device}: torch sees {torch.cuda.device_count()} CUDA devices; use --device cpu")
    return target


DTYPES = ("float32", "bfloat16")
"""Of matrix products where a model is used; training also takes "auto"."""


def autocast(dtype: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """In which matrix products are of `dtype`: float32, bfloat16, or auto, which is bfloat16 on CUDA alone."""
    if dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda"):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """Torch's CPU threads as they were, afterwards: an encoder sets them, and sums of floats depend on them."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
