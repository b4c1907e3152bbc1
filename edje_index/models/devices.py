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


DTYPES = ("auto", "float32", "bfloat16")
"""Of matrix products, by name."""


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The number type that a name stands for: auto is bfloat16 on CUDA and float32 elsewhere.

    Raises:
        ModelError: no such name.
    """
    if dtype not in DTYPES:
        raise ModelError(f"unknown number type {dtype!r}: one of {', '.join(DTYPES)}")
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def autocast(dtype: torch.dtype, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """In which matrix products are of `dtype`; weights stay as they are."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """Torch's CPU threads as they were, afterwards: an encoder sets them, and sums of floats depend on them."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
