"""Measures the encoding and decoding rates of each precision, without and with an
offset, and compares fp8 with torch. Rates are in GB/s of bfloat16 tokens.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from benchmarks.report import median_ratio
from pipelines.environment import environment
from storage_formats.codecs import BF16, Blocks, Codec, codec, precisions
from storage_formats.codecs.base import Bytes, Moves
from storage_formats.threads import run_chunks

BLOCK_SHAPE = (64, 384)
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
    """Measure each codec `repeats` times on `blocks` blocks.

    The task `gather` decodes random records of a memory-mapped temporary file.

    Returns:
        Rates of each run, median rates, and median ratios to the first subject of each
        task.
    """
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((blocks, *BLOCK_SHAPE), dtype=np.float32).astype(BF16)
    offset = rng.standard_normal(BLOCK_SHAPE, dtype=np.float32)
    order = rng.permutation(blocks)
    rows = np.arange(blocks)
    out = np.empty_like(tokens)
    tasks: dict[str, Subjects] = {}
    gathers: Subjects = {}
    for name in precisions():
        encoders: Subjects = {}
        decoders: Subjects = {}
        for values, label in ((None, ""), (offset, " with an offset")):
            ours = codec(name, BLOCK_SHAPE, values)
            records = ours.encode(tokens)
            with tempfile.TemporaryFile() as file:
                records.tofile(file)
                mapped = np.memmap(file, dtype=np.uint8, mode="r")
            moves = (order * ours.record_bytes, rows)
            encoders[f"edje{label}"] = partial(ours.encode, tokens)
            decoders[f"edje{label}"] = partial(ours.decode, records, out)
            gathers[f"{name}{label}"] = partial(_gather, ours, mapped, moves, out)
            if not ours.has_offset:
                break
        if name == "bf16":
            continue
        if name == "fp8":
            source, target = (
                torch.from_numpy(each.view(np.int16)).view(torch.bfloat16)
                for each in (tokens, out)
            )
            codes, scales = _scaled(source)
            encoders["torch"] = partial(_scaled, source)
            decoders["torch"] = partial(_descaled, codes, scales, target)
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
        first, *others = rates
        ratios[task] = {
            f"{name} / {first}": median_ratio(rates[name], rates[first])
            for name in others
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
