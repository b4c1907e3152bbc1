"""Measures the encoding and decoding rates of each precision, and compares the rates
with torch and ml_dtypes.

Rates are in GB/s of bfloat16 tokens. Casts with `ml_dtypes` and `torch` compute no
scales, so they do less work than the codecs of this project. The entry `torch scaled`
encodes and decodes fp8 with scales.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch

from benchmarks.report import median_ratio
from pipelines.environment import environment
from storage_formats.codecs import BF16, Blocks, Codec, codec, precisions
from storage_formats.codecs.base import Bytes, Moves
from storage_formats.threads import run_chunks

BLOCK_SHAPE = (64, 384)
_CASTS = {
    "fp8": "float8_e4m3fn",
    "mxfp8": "float8_e4m3fn",
    "mxfp4": "float4_e2m1fn",
    "nvfp4": "float4_e2m1fn",
}
Subjects: TypeAlias = dict[str, Callable[[], Any]]


def _gather(ours: Codec, memory: Bytes, moves: Moves, out: Blocks) -> None:
    bits = out.view(np.uint16).reshape(-1)
    run_chunks(
        lambda start, stop: ours.decode_at(memory, moves, bits, (start, stop)),
        len(out),
        out[0].nbytes,
        None,
    )


def bench_quantize(*, blocks: int = 512, repeats: int = 7) -> dict[str, Any]:
    """Measure each codec and each compared library `repeats` times on `blocks` blocks.

    The task `gather` decodes random records of a memory-mapped temporary file.

    Returns:
        Rates of each run, median rates, and median ratios: of the codec to each
        compared library, and in `gather` of each precision to bfloat16.
    """
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((blocks, *BLOCK_SHAPE), dtype=np.float32).astype(BF16)
    order = rng.permutation(blocks)
    rows = np.arange(blocks)
    out = np.empty_like(tokens)
    tasks: dict[str, Subjects] = {}
    gathers: Subjects = {}
    for name in precisions():
        ours = codec(name, BLOCK_SHAPE)
        records = ours.encode(tokens)
        with tempfile.TemporaryFile() as file:
            records.tofile(file)
            mapped = np.memmap(file, dtype=np.uint8, mode="r")
        moves = (order * ours.record_bytes, rows)
        gathers[name] = partial(_gather, ours, mapped, moves, out)
        if name == "bf16":
            continue
        encoders: Subjects = {"edje": partial(ours.encode, tokens)}
        decoders: Subjects = {"edje": partial(ours.decode, records, out)}
        if name in _CASTS:
            element = getattr(ml_dtypes, _CASTS[name])
            encoders["ml_dtypes cast"] = partial(tokens.astype, element)
            decoders["ml_dtypes cast"] = partial(
                np.copyto, out, tokens.astype(element), casting="unsafe"
            )
        if name == "fp8":
            source, target = (
                torch.from_numpy(each.view(np.int16)).view(torch.bfloat16)
                for each in (tokens, out)
            )
            codes, scales = _scaled(source)
            encoders["torch cast"] = partial(source.to, torch.float8_e4m3fn)
            encoders["torch scaled"] = partial(_scaled, source)
            decoders["torch cast"] = partial(target.copy_, codes)
            decoders["torch scaled"] = partial(_descaled, codes, scales, target)
        tasks[f"encode {name}"] = encoders
        tasks[f"decode {name}"] = decoders
    tasks["gather"] = gathers
    all_rates = {}
    medians = {}
    ratios = {}
    for task, subjects in tasks.items():
        for convert in subjects.values():
            # compiles the kernels and touches the output
            convert()
        rates: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(repeats):
            for name, convert in subjects.items():
                started = time.perf_counter()
                convert()
                rates[name].append(
                    tokens.nbytes / 1e9 / (time.perf_counter() - started)
                )
        all_rates[task] = rates
        medians[task] = {
            name: statistics.median(values) for name, values in rates.items()
        }
        if task == "gather":
            pairs = [(name, "bf16") for name in rates if name != "bf16"]
        else:
            pairs = [("edje", name) for name in rates if name != "edje"]
        ratios[task] = {
            f"{name} / {other}": median_ratio(rates[name], rates[other])
            for name, other in pairs
        }
    return {
        "environment": environment(),
        "settings": {"blocks": blocks, "block_shape": BLOCK_SHAPE, "repeats": repeats},
        "gb_per_s": all_rates,
        "median": medians,
        "ratios": ratios,
    }


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report as text."""
    for task, rates in report["median"].items():
        yield f"{task:14} " + "  ".join(
            f"{name} {rate:.2f} GB/s" for name, rate in rates.items()
        )
        yield " " * 15 + "  ".join(
            f"{name} {ratio:.2f}x" for name, ratio in report["ratios"][task].items()
        )


def _descaled(
    codes: torch.Tensor, scales: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    return torch.mul(codes.to(torch.bfloat16), scales, out=target)


def _scaled(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 codes and one bfloat16 scale per token."""
    largest = tokens.abs().amax(dim=-1, keepdim=True).float()
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448))).to(torch.bfloat16)
    return (tokens / scales).to(torch.float8_e4m3fn), scales
