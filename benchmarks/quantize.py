"""Measures the rates at which blocks are encoded to each precision, decoded, and
decoded in random order, without and with an offset, in GB/s of bfloat16 tokens. An
offset is a block that is subtracted from every block before encoding and added after
decoding.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.report import Report
from edje_index.evaluation.report import table
from pipelines.environment import environment
from storage_formats.codecs import BF16, Blocks, Codec, codec, precisions
from storage_formats.codecs.base import Bytes, Moves
from storage_formats.threads import run_chunks

BLOCK_SHAPE = (64, 384)
TASKS = ("encode", "decode", "gather")


def bench_quantize(*, blocks: int = 512, repeats: int = 7) -> Report:
    """Measure each codec `repeats` times on `blocks` blocks, in GB/s of bfloat16
    tokens. The codecs take turns.

    The task `gather` decodes random records of a memory-mapped temporary file.

    Returns:
        The rates of all runs, by codec and task, and the median of the runs.
    """
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((blocks, *BLOCK_SHAPE), dtype=np.float32).astype(BF16)
    offset = rng.standard_normal(BLOCK_SHAPE, dtype=np.float32)
    out = np.empty_like(tokens)
    codecs: dict[str, tuple[Callable[[], Any], ...]] = {}
    for name in precisions():
        for values, label in ((None, name), (offset, f"{name} with an offset")):
            ours = codec(name, BLOCK_SHAPE, values)
            records = ours.encode(tokens)
            with tempfile.TemporaryFile() as file:
                records.tofile(file)
                mapped = np.memmap(file, dtype=np.uint8, mode="r")
            moves = (rng.permutation(blocks) * ours.record_bytes, np.arange(blocks))
            codecs[label] = (
                partial(ours.encode, tokens),
                partial(ours.decode, records, out),
                partial(_gather, ours, mapped, moves, out),
            )
            if not ours.has_offset:
                break
    rates: dict[str, dict[str, list[float]]] = {
        name: {task: [] for task in TASKS} for name in codecs
    }
    # The first turn is not counted, because it compiles the kernels, and because its
    # first writes to the output array cause page faults.
    for turn in range(repeats + 1):
        for name, steps in codecs.items():
            for task, convert in zip(TASKS, steps, strict=True):
                started = time.perf_counter()
                convert()
                seconds = time.perf_counter() - started
                if turn:
                    rates[name][task].append(tokens.nbytes / 1e9 / seconds)
    medians = {
        name: {task: statistics.median(runs) for task, runs in of_name.items()}
        for name, of_name in rates.items()
    }
    return {
        "environment": environment(),
        "settings": {"blocks": blocks, "block_shape": BLOCK_SHAPE, "repeats": repeats},
        "gb_per_s": rates,
        "median": medians,
    }


def report_lines(report: Report) -> list[str]:
    """Return the lines of the report as text."""
    rows = [
        (name, *(f"{rate:.2f}" for rate in rates.values()))
        for name, rates in report["median"].items()
    ]
    return table(("GB/s", *TASKS), rows)


def _gather(ours: Codec, memory: Bytes, moves: Moves, out: Blocks) -> None:
    bits = out.view(np.uint16).reshape(-1)
    run_chunks(
        lambda start, stop: ours.decode_at(memory, moves, bits, (start, stop)),
        len(out),
        out[0].nbytes,
        None,
    )
