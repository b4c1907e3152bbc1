"""Measures the joint encoder in pairs per second, and the duration of each stage of
a query.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import untrained_joint_encoder
from edje_index.models.devices import resolve_device, resolve_dtype, threads_kept
from edje_index.models.joint_encoder import JointEncoder
from edje_index.scoring.weights import BUNDLE_SCORE
from edje_index.search.token_index import TokenIndex
from pipelines.environment import environment
from storage_formats.errors import UsageError
from storage_formats.format.manifest import Manifest
from storage_formats.threads import usable_cpus

CAPTION = "a brown dog runs over wet sand towards a red ball near the sea"
"""13 common words: 16 tokens with [CLS] and both [SEP], 80 with the 64 tokens of an
image.
"""
MINILM_LAYERS = {"MiniLM-L6-H384": 6, "MiniLM-L12-H384": 12}
_BLOCK_SHAPE = (64, 384)
_VOCABULARY = 16000
_QUERY_STAGES = {
    "text": ("text_tower",),
    "nearest": ("nearest",),
    "fetch": ("fetch",),
    "score": ("joint_encoder", "other_parts"),
}


@torch.inference_mode()
def bench_rerank(
    model: Path | None = None,
    index: Path | None = None,
    *,
    score: str = BUNDLE_SCORE,
    batch_sizes: Sequence[int] = (1, 32, 128),
    threads: Sequence[int] = (),
    pool: int = 100,
    repeats: int = 5,
    device: str = "auto",
    dtype: str = "float32",
) -> dict[str, Any]:
    """Return pairs per second of each joint encoder, and milliseconds of each query
    stage.

    The arguments are options of `edje-index bench rerank`.
    """
    if index is None and score != BUNDLE_SCORE:
        raise UsageError(
            "--score has an effect only with --index: give the index to search, or"
            " leave out --score"
        )
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    encoders: dict[str, tuple[JointEncoder, tuple[int, int]]] = {}
    if model is None:
        width = _BLOCK_SHAPE[1]
        for name, layers in MINILM_LAYERS.items():
            sizes = {
                "words": _VOCABULARY,
                "width": width,
                "intermediate": 4 * width,
                "layers": layers,
                "heads": 12,
            }
            encoders[name] = (
                untrained_joint_encoder(width, **sizes).to(torch_device),
                _BLOCK_SHAPE,
            )
    else:
        bundle = ModelBundle.load(model, device=str(torch_device), verify=False)
        config = bundle.joint.config
        name = (
            f"{model.name}: {config.num_hidden_layers} layers, width"
            f" {config.hidden_size}"
        )
        encoders[name] = bundle.joint, bundle.block_shape
    models: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    for name, (joint, block_shape) in encoders.items():
        joint.compute_dtype = torch_dtype
        scorer = joint.scorer()
        rates = dict[str, list[float]]()
        for count, batch in itertools.product(
            threads or sorted({1, usable_cpus()}), batch_sizes
        ):
            blocks = torch.from_numpy(
                rng.standard_normal((batch, *block_shape), dtype=np.float32)
            ).to(torch.bfloat16)
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
        medians = {
            setting: statistics.median(values) for setting, values in rates.items()
        }
        models[name] = {
            "parameters": sum(parameter.numel() for parameter in joint.parameters()),
            "tokens_per_pair": (
                joint.tokenizer.inputs([CAPTION], block_shape[0]).input_ids.shape[1]
            ),
            "pairs_per_s": rates,
            "median": medians,
            "best": max(medians, key=lambda setting: medians[setting]),
        }
    report: dict[str, Any] = {
        "environment": environment(),
        "device": str(torch_device),
        "dtype": str(torch_dtype).removeprefix("torch."),
        "joint_encoders": models,
    }
    if index is not None:
        if Manifest.load(index).ann.get("kind") == "none":
            raise UsageError(
                f"{index} has no nearest-neighbour index, so the index cannot be"
                " searched; choose an index that was built from images"
            )
        opened = TokenIndex.open(index, model, score=score, device=device, dtype=dtype)
        runs = [opened.search(CAPTION, pool, pool) for _ in range(repeats + 1)]
        medians = {
            name: (
                1e3
                * statistics.median(
                    sum(hits.stages.get(part, 0.0) for part in parts)
                    for hits in runs[1:]
                )
            )
            for name, parts in _QUERY_STAGES.items()
            if any(part in runs[0].stages for part in parts)
        }
        report["query"] = {
            "index": str(index),
            "precision": opened.precision,
            "score": score,
            "pool": len(runs[0]),
            "ms": medians,
            "total_ms": sum(medians.values()),
        }
    return report


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report as text."""
    for name, rates in report["joint_encoders"].items():
        yield (
            f"{name}, {rates['tokens_per_pair']} tokens per pair, {report['device']},"
            f" {report['dtype']}"
        )
        yield from (
            f"  {setting:24} {rate:10.1f} pairs/s"
            for setting, rate in rates["median"].items()
        )
    if "query" in report:
        query = report["query"]
        stages = ", ".join(f"{name} {value:.2f}" for name, value in query["ms"].items())
        yield (
            f"query of {query['pool']} candidates: {query['total_ms']:.1f} ms"
            f" ({stages})"
        )
