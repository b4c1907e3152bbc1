"""Measures the joint encoder in pairs per second, and the duration of each stage of a query."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import read_bundle_info, recorded_bundle
from edje_index.bundles.random_bundle import untrained_tokenizer
from edje_index.indexing.faiss_index import AnnIndex
from edje_index.models.devices import resolve_device, resolve_dtype
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.scoring.weights import BUNDLE_SCORE
from edje_index.search.reranking import Candidates, Reranker
from edje_index.search.search_model import SearchModel
from pipelines.environment import environment
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.token_store import TokenStore

CAPTION = "a brown dog runs over wet sand towards a red ball near the sea"
"""13 common words: 16 tokens with [CLS] and both [SEP], 80 with the 64 tokens of an image."""
MINILM_LAYERS = {"MiniLM-L6-H384": 6, "MiniLM-L12-H384": 12}
_BLOCK_SHAPE = (64, 384)
_VOCABULARY = 16000
_T = TypeVar("_T")


@dataclass(frozen=True)
class RerankBench:
    """Settings of `bench_rerank`.

    Attributes:
        model: bundle with the joint encoder to measure; None for joint encoders with random weights and the sizes of
            MiniLM.
        index: index for measuring the stages of a query, built with the encoder of `model`; None to measure no query.
        score: final score of the query. See `edje_index.scoring.weights.parse_score`.
        caption: text of every pair.
        batch_sizes: numbers of pairs per forward pass to measure.
        threads: numbers of torch threads to measure. They have an effect only on a CPU.
        pool: number of candidates of the query.
        repeats: number of runs of each setting.
        device: "auto", "cpu" or "cuda".
        dtype: data type of the joint encoder's matrix products: "auto", "float32" or "bfloat16".
    """

    model: Path | None = None
    index: Path | None = None
    score: str = BUNDLE_SCORE
    caption: str = CAPTION
    batch_sizes: tuple[int, ...] = (1, 32, 128)
    threads: tuple[int, ...] = (1, 2)
    pool: int = 100
    repeats: int = 5
    device: str = "auto"
    dtype: str = "float32"


def bench_rerank(bench: RerankBench) -> dict[str, Any]:
    """Return pairs per second of each joint encoder, and milliseconds of each query stage."""
    device = resolve_device(bench.device)
    dtype = resolve_dtype(bench.dtype, device)
    models = {}
    for name, joint, block_shape in _joint_encoders(bench, device):
        joint.compute_dtype = dtype
        models[name] = _rates(bench, joint, block_shape)
    report: dict[str, Any] = {
        "environment": environment(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "joint_encoders": models,
    }
    if bench.index is not None:
        report["query"] = _query(bench, bench.index)
    return report


def _rates(bench: RerankBench, joint: JointEncoder, block_shape: tuple[int, int]) -> dict[str, Any]:
    rates = {
        f"batch {batch}, {threads} threads": pairs_per_second(joint, block_shape, bench, batch, threads)
        for threads in bench.threads
        for batch in bench.batch_sizes
    }
    medians = {setting: statistics.median(values) for setting, values in rates.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in joint.parameters()),
        "tokens_per_pair": joint.tokenizer.inputs([bench.caption], block_shape[0]).input_ids.shape[1],
        "pairs_per_s": rates,
        "median": medians,
        "best": max(medians, key=lambda setting: medians[setting]),
    }


def needed_pairs_per_second(model: Path, device: str = "auto") -> dict[str, Any]:
    """Return the highest rate of the joint encoder in pairs per second, and the batch size with this rate."""
    threads = (torch.get_num_threads(),)
    report = bench_rerank(RerankBench(model=model, batch_sizes=(32, 128), threads=threads, repeats=3, device=device))
    ((name, rates),) = report["joint_encoders"].items()
    return {
        "name": name,
        "setting": rates["best"],
        "device": report["device"],
        "pairs_per_s": rates["median"][rates["best"]],
    }


@torch.inference_mode()
def pairs_per_second(
    joint: JointEncoder, block_shape: tuple[int, int], bench: RerankBench, batch: int, threads: int
) -> list[float]:
    """Return the pairs per second of each repeat. Tokenisation and copies to the device are included."""
    rng = np.random.default_rng(0)
    blocks = torch.from_numpy(rng.standard_normal((batch, *block_shape), dtype=np.float32)).to(torch.bfloat16)

    scorer = joint.scorer()

    def score() -> None:
        scorer.score([bench.caption] * batch, blocks)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        score()
        return [batch / _seconds(score) for _ in range(bench.repeats)]
    finally:
        torch.set_num_threads(before)


def _joint_encoders(bench: RerankBench, device: torch.device) -> Iterable[tuple[str, JointEncoder, tuple[int, int]]]:
    """Yield (name, joint encoder, block shape) of each joint encoder to measure."""
    if bench.model is not None:
        bundle = ModelBundle.load(bench.model, device=str(device), verify=False)
        config = bundle.joint.config
        name = f"{bench.model.name}: {config.num_hidden_layers} layers, width {config.hidden_size}"
        yield name, bundle.joint, bundle.block_shape
        return
    for name, layers in MINILM_LAYERS.items():
        yield name, random_joint_encoder(layers, _BLOCK_SHAPE[1]).to(device), _BLOCK_SHAPE


def random_joint_encoder(layers: int, width: int, words: int = _VOCABULARY) -> JointEncoder:
    """Return a joint encoder with random weights.

    Args:
        layers: number of layers.
        width: width of the layers and of the image tokens.
        words: size of the vocabulary.
    """
    tokenizer = untrained_tokenizer(words)
    config = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "intermediate_size": 4 * width,
        "max_position_embeddings": 512,
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
    }
    return JointEncoder(bert_config(config), tokenizer, width)


def _query(bench: RerankBench, index: Path) -> dict[str, Any]:
    """Return the median milliseconds of each stage of a query. The first run is not counted."""
    committed = CommittedIndex.open(index)
    manifest = committed.manifest
    if manifest.ann.get("kind") == "none":
        raise UsageError(
            f"{index} has no nearest-neighbour index, so the index cannot be searched; choose an index that was "
            "built from images"
        )
    path = bench.model or recorded_bundle(committed)
    model = SearchModel(read_bundle_info(path), device=bench.device, dtype=bench.dtype)
    ann, reranker = AnnIndex.open(index), Reranker(committed, model, score=bench.score)
    precision = manifest.spec.precisions[0]
    stages: dict[str, list[float]] = {"text": [], "nearest": [], "fetch": [], "score": []}
    with TokenStore.open(index, precision) as store:
        for _ in range(bench.repeats + 1):
            query = _timed(stages["text"], lambda: model.text.encode([bench.caption])[0])
            candidates = Candidates(*_timed(stages["nearest"], partial(ann.nearest, query, bench.pool)))
            blocks = None
            if reranker.reads_tokens:
                blocks = _timed(stages["fetch"], partial(store.fetch, candidates.rows))
            _timed(stages["score"], partial(reranker.scores, [bench.caption], [candidates], blocks))
    medians = {name: statistics.median(times[1:]) * 1e3 for name, times in stages.items() if times}
    return {
        "index": str(index),
        "precision": precision,
        "score": bench.score,
        "pool": len(candidates.rows),
        "ms": medians,
        "total_ms": sum(medians.values()),
    }


def _timed(seconds: list[float], work: Callable[[], _T]) -> _T:
    started = time.perf_counter()
    result = work()
    seconds.append(time.perf_counter() - started)
    return result


def _seconds(work: Callable[[], None]) -> float:
    seconds: list[float] = []
    _timed(seconds, work)
    return seconds[0]
