"""Measures the encoding and decoding rates of each precision, and compares the rates with torch, torchao and ml_dtypes.

Rates are in GB/s of bfloat16 tokens. Casts with `ml_dtypes` and `torch` compute no scales, so they do less work than
the codecs of this project. The entry `torch scaled` encodes and decodes fp8 with scales.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from pipelines.environment import environment
from storage_formats.codecs import BF16, Blocks, codec, precisions

BLOCK_SHAPE = (64, 384)
Subjects: TypeAlias = dict[str, Callable[[], Any]]
_CASTS = {"fp8": "float8_e4m3fn", "mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn", "nvfp4": "float4_e2m1fn"}
_EDJE = "edje"


def bench_codecs(folder: Path, blocks: int, repeats: int, threads: int | None = None) -> dict[str, Any]:
    """Measure each codec and each compared library `repeats` times on `blocks` blocks.

    The task `gather` decodes random records of a memory-mapped file in `folder`.

    Returns:
        Rates of each run, median rates, and median ratios of the codec to each compared library.
    """
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((blocks, *BLOCK_SHAPE), dtype=np.float32).astype(BF16)
    tasks: dict[str, Subjects] = {}
    for name in precisions():
        if name != "bf16":
            tasks[f"encode {name}"] = _encoders(name, tokens, threads)
            tasks[f"decode {name}"] = _decoders(name, tokens, threads)
    tasks["gather"] = _gathers(folder, tokens, threads)
    rates = {task: _rates(subjects, tokens.nbytes, repeats) for task, subjects in tasks.items()}
    return {
        "environment": environment(),
        "settings": {"blocks": blocks, "block_shape": BLOCK_SHAPE, "repeats": repeats, "threads": threads},
        "gb_per_s": rates,
        "median": {task: _medians(task_rates) for task, task_rates in rates.items()},
        "ratios": {
            task: _ratios(task_rates, "bf16" if task == "gather" else _EDJE) for task, task_rates in rates.items()
        },
    }


def _rates(subjects: Subjects, size: int, repeats: int) -> dict[str, list[float]]:
    for convert in subjects.values():
        convert()  # compiles the kernels and touches the output
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, convert in subjects.items():
            started = time.perf_counter()
            convert()
            rates[name].append(size / 1e9 / (time.perf_counter() - started))
    return rates


def _medians(rates: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rates.items()}


def _ratios(rates: dict[str, list[float]], base: str) -> dict[str, float]:
    """Return the median ratio of the codec to each compared library.

    For gathers, `base` is bfloat16. The ratios are then those of each precision to bfloat16.
    """
    pairs = {
        (f"{base} / {name}" if base == _EDJE else f"{name} / {base}"): zip(rates[base], values, strict=True)
        for name, values in rates.items()
        if name != base
    }
    return {
        title: statistics.median(left / right if base == _EDJE else right / left for left, right in pair)
        for title, pair in pairs.items()
    }


def _encoders(name: str, tokens: Blocks, threads: int | None) -> Subjects:
    entry = codec(name, BLOCK_SHAPE)
    subjects: Subjects = {_EDJE: lambda: entry.encode(tokens, threads)}
    if name in _CASTS:
        element = getattr(ml_dtypes, _CASTS[name])
        subjects["ml_dtypes cast"] = lambda: tokens.astype(element)
    if name == "fp8":
        import torch

        source = _torch(tokens)
        subjects["torch cast"] = lambda: source.to(torch.float8_e4m3fn)
        subjects["torch scaled"] = lambda: _torch_scaled(source)
    return subjects | _torchao(name, tokens)[0]


def _decoders(name: str, tokens: Blocks, threads: int | None) -> Subjects:
    entry = codec(name, BLOCK_SHAPE)
    records, out = entry.encode(tokens), np.empty_like(tokens)
    subjects: Subjects = {_EDJE: lambda: entry.decode(records, out, threads)}
    if name in _CASTS:
        narrow = tokens.astype(_CASTS[name])
        subjects["ml_dtypes cast"] = lambda: np.copyto(out, narrow, casting="unsafe")
    if name == "fp8":
        import torch

        target = _torch(out)
        codes, scales = _torch_scaled(_torch(tokens))
        subjects["torch cast"] = lambda: target.copy_(codes)
        subjects["torch scaled"] = lambda: torch.mul(codes.to(torch.bfloat16), scales, out=target)
    return subjects | _torchao(name, tokens)[1]


def _gathers(folder: Path, tokens: Blocks, threads: int | None) -> Subjects:
    rows = np.random.default_rng(1).permutation(len(tokens))
    out = np.empty_like(tokens)
    subjects: Subjects = {}
    for name in precisions():
        entry = codec(name, BLOCK_SHAPE)
        path = folder / f"records-{name}"
        entry.encode(tokens).tofile(path)
        mapped = np.memmap(path, dtype=np.uint8, mode="r", shape=(len(tokens), entry.record_bytes))
        subjects[name] = lambda entry=entry, mapped=mapped: entry.decode_rows(mapped, rows, out, threads)  # type: ignore[misc]
    return subjects


def _torch(blocks: Blocks) -> Any:
    import torch

    return torch.from_numpy(blocks.view(np.int16)).view(torch.bfloat16)


def _torch_scaled(tokens: Any) -> tuple[Any, Any]:
    """Encode with torch. Return E4M3 codes and one bfloat16 scale per token."""
    import torch

    largest = tokens.abs().amax(dim=-1, keepdim=True).float()
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448))).to(torch.bfloat16)
    return (tokens / scales).to(torch.float8_e4m3fn), scales


def _torchao(name: str, tokens: Blocks) -> tuple[Subjects, Subjects]:
    """Return the encoders and decoders of torchao for the precision `name`; empty if torchao is not installed."""
    if name not in ("mxfp8", "mxfp4", "nvfp4"):
        return {}, {}
    try:
        import torch

        mx = import_module("torchao.prototype.mx_formats.mx_tensor").MXTensor
        nvfp4 = import_module("torchao.prototype.mx_formats.nvfp4_tensor").NVFP4Tensor
    except ImportError:
        return {}, {}
    source = _torch(tokens).reshape(-1, BLOCK_SHAPE[1])
    element = torch.float8_e4m3fn if name == "mxfp8" else torch.float4_e2m1fn_x2

    def encode() -> Any:
        return nvfp4.to_nvfp4(source) if name == "nvfp4" else mx.to_mx(source, element)

    packed = encode()
    return {"torchao": encode}, {"torchao": lambda: packed.dequantize(torch.bfloat16)}
