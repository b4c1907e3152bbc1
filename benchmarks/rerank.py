"""Measures the joint encoder in pairs per second, and the duration of each stage of
a query.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.report import Report
from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import untrained_joint_encoder
from edje_index.models.devices import resolve_device, resolve_dtype, threads_kept
from edje_index.scoring.weights import BUNDLE_SCORE
from edje_index.search.token_index import TokenIndex
from pipelines.environment import environment
from storage_formats.errors import UsageError
from storage_formats.format.manifest import Manifest
from storage_formats.threads import usable_cpus

CAPTION = "a brown dog runs over wet sand towards a red ball near the sea"
"""Caption of 14 common words, one token each. With [CLS], two [SEP] and the 64 tokens
of an image, a pair has 81 tokens.
"""
# numbers of pairs per forward pass
_BATCHES = (1, 32, 64, 128)
_BLOCK_SHAPE = (64, 384)
# sizes of the language model MiniLM-L12-H384
_SIZES = {
    "words": 16000,
    "width": 384,
    "intermediate": 1536,
    "layers": 12,
    "heads": 12,
}
# Maps each stage of the report to the stages of `Hits.stages` whose times it sums.
_QUERY_STAGES = {
    "text": ("text_tower",),
    "nearest": ("nearest",),
    "fetch": ("fetch",),
    "score": ("joint_encoder", "other_parts"),
}


@torch.inference_mode()
def bench_rerank(
    model: Path | None,
    index: Path | None,
    *,
    score: str,
    pool: int,
    device: str,
    dtype: str,
    repeats: int = 5,
) -> Report:
    """Measure the pairs per second of the joint encoder, with one thread and with one
    thread per CPU. If `index` is given, also measure the milliseconds of each stage of
    a query.

    The arguments are options of `edje-index bench rerank`.
    """
    if index is None and score != BUNDLE_SCORE:
        raise UsageError(
            "--score has an effect only with --index: give the index to search, or"
            " leave out --score"
        )
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    block_shape = _BLOCK_SHAPE
    if model is None:
        joint = untrained_joint_encoder(_BLOCK_SHAPE[1], **_SIZES).to(torch_device)
    else:
        bundle = ModelBundle.load(model, device=str(torch_device), verify=False)
        joint = bundle.joint
        block_shape = bundle.block_shape
    joint.compute_dtype = torch_dtype
    scorer = joint.scorer()
    rates = dict[str, list[float]]()
    for count, batch in itertools.product(sorted({1, usable_cpus()}), _BATCHES):
        blocks = torch.randn(batch, *block_shape).to(torch.bfloat16)
        seconds = []
        with threads_kept():
            torch.set_num_threads(count)
            # the first run is the warm-up
            for _ in range(1 + repeats):
                started = time.perf_counter()
                # includes tokenisation and copies to the device
                scorer.score([CAPTION] * batch, blocks)
                seconds.append(time.perf_counter() - started)
        rates[f"batch {batch}, {count} threads"] = [
            batch / each for each in seconds[1:]
        ]
    config = joint.config
    report: Report = {
        "environment": environment(),
        "device": str(torch_device),
        "dtype": str(torch_dtype).removeprefix("torch."),
        "joint_encoder": {
            "model": "random weights" if model is None else model.name,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "parameters": sum(parameter.numel() for parameter in joint.parameters()),
            "tokens_per_pair": (
                joint.tokenizer.inputs([CAPTION], block_shape[0]).input_ids.shape[1]
            ),
            "pairs_per_s": rates,
            "median": {name: statistics.median(runs) for name, runs in rates.items()},
        },
    }
    if index is not None:
        if Manifest.load(index).ann.get("kind") == "none":
            raise UsageError(
                f"{index} has no nearest-neighbour index, so the index cannot be"
                " searched; choose an index that was built from images"
            )
        opened = TokenIndex.open(index, model, score=score, device=device, dtype=dtype)
        runs = [opened.search(CAPTION, pool, pool) for _ in range(repeats + 1)]
        milliseconds = {}
        for name, parts in _QUERY_STAGES.items():
            seconds = [
                sum(hits.stages.get(part, 0.0) for part in parts) for hits in runs[1:]
            ]
            if any(seconds):
                milliseconds[name] = 1e3 * statistics.median(seconds)
        report["query"] = {
            "index": str(index),
            "precision": opened.precision,
            "score": score,
            "pool": len(runs[0]),
            "ms": milliseconds,
            "total_ms": sum(milliseconds.values()),
        }
    return report


def report_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report as text."""
    joint = report["joint_encoder"]
    yield (
        f"{joint['model']}: {joint['layers']} layers, width {joint['width']},"
        f" {joint['tokens_per_pair']} tokens per pair, {report['device']},"
        f" {report['dtype']}"
    )
    yield from (
        f"  {setting:24} {rate:10.1f} pairs/s"
        for setting, rate in joint["median"].items()
    )
    if "query" in report:
        query = report["query"]
        stages = ", ".join(f"{name} {value:.2f}" for name, value in query["ms"].items())
        yield (
            f"query of {query['pool']} candidates: {query['total_ms']:.1f} ms"
            f" ({stages})"
        )
