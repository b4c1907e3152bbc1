"""An evaluation from beginning to end: what is measured on which indexes, and the figures that come of it."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edje_index.captions.matching import MatchedRows, match_items
from edje_index.captions.reading import CaptionedImage, read_captions
from edje_index.evaluation.bootstrap import ClusterBootstrap, Estimate
from edje_index.evaluation.config import DIRECTIONS, IMAGE_TO_TEXT, TEXT_TO_IMAGE, EvaluationConfig
from edje_index.evaluation.hubness import caption_priors, image_priors
from edje_index.evaluation.pair_scores import PairScorer, ScoreCache, pack
from edje_index.evaluation.pools import Pools, embedding_pools
from edje_index.evaluation.protocol import EvaluationSet, full_set, split_set
from edje_index.evaluation.recall import Floats, Ints, hits, ranks_after_reranking
from edje_index.evaluation.results import Evaluation, Inputs, Result, System
from edje_index.evaluation.token_sources import TokenSource, token_sources
from edje_index.progress import OnProgress
from edje_index.search.token_index import check_reranks, fused_scores, load_search_model
from storage_formats.errors import UsageError
from storage_formats.format.manifest import Manifest
from storage_formats.reading.embeddings import read_embeddings

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle

NOT_IN_OTHER = "not-in-another-index"
_PERCENT = 100.0


@dataclass
class _Opened:
    """One index at work."""

    name: str
    root: Path
    manifest: Manifest
    model_path: Path | None
    sources: list[TokenSource]
    matched: MatchedRows
    pairs: int = 0
    queries: dict[str, int] = field(default_factory=dict)
    candidates: dict[str, int] = field(default_factory=dict)


def evaluate(config: EvaluationConfig, on_progress: OnProgress) -> Evaluation:
    """Measure recall.

    Raises:
        UsageError: options that contradict each other, captions that cannot be read or match no image, a precision
            that is not there.
        ModelError: a bundle that is not there, did not build its index, or cannot re-rank.
    """
    began = time.monotonic()
    _check(config)
    everything = read_captions(config.captions, config.images)
    items = everything if config.split is None else read_captions(config.captions, config.images, config.split)
    opened = [_open(config, name, *system, items) for name, system in _named(config.systems)]
    used = np.logical_and.reduce([each.matched.rows >= 0 for each in opened])
    inputs = _inputs(items, opened, used)
    systems, results = [], []
    for each in opened:
        asked = split_set([item for item, keep in zip(items, used, strict=True) if keep], each.matched.rows[used])
        if config.full:
            asked = full_set(each.root, asked, *_others(config, everything, each.root))
        if config.queries is not None:
            asked = asked.subsampled(config.queries, config.seed)
        system, figures = _evaluate_one(config, each, asked, on_progress)
        systems.append(system)
        results += figures
    return Evaluation(
        protocol="full" if config.full else "split",
        captions=str(config.captions),
        split=config.split,
        cutoffs=config.cutoffs,
        pools=config.pool_sizes if config.rerank else (),
        resamples=config.resamples,
        seed=config.seed,
        inputs=inputs,
        systems=tuple(systems),
        results=tuple(results),
        pairs=sum(each.pairs for each in opened),
        seconds=time.monotonic() - began,
    )


def _check(config: EvaluationConfig) -> None:
    if config.full_captions and not config.full:
        raise UsageError("further captions to be found belong to the full protocol: give --full too")
    if not config.directions or not set(config.directions) <= set(DIRECTIONS):
        raise UsageError(f"a direction is one of {', '.join(DIRECTIONS)}, got {', '.join(config.directions) or 'none'}")
    if min((*config.pool_sizes, 1)) < 1:
        raise UsageError("a pool holds at least 1 candidate")


def _named(systems: Sequence[tuple[Path, Path | None]]) -> list[tuple[str, tuple[Path, Path | None]]]:
    """Systems with names for people: the index's own, numbered where two are the same."""
    stems = [root.resolve().stem for root, _ in systems]
    counts = Counter(stems)
    return [
        (stem if counts[stem] == 1 else f"{stem} {stems[: at + 1].count(stem)}", system)
        for at, (stem, system) in enumerate(zip(stems, systems, strict=True))
    ]


def _open(
    config: EvaluationConfig, name: str, root: Path, model: Path | None, items: Sequence[CaptionedImage]
) -> _Opened:
    """Everything that can be refused is refused here, before anything is computed; the weights are read later."""
    manifest = Manifest.load(root)
    sources = token_sources(root, config.precisions, simulate=config.simulate) if config.rerank else []
    return _Opened(name, root, manifest, model, sources, match_items(root, items))


def _inputs(items: Sequence[CaptionedImage], opened: Sequence[_Opened], used: np.ndarray[Any, Any]) -> Inputs:
    reasons: Counter[str] = Counter()
    for at, keep in enumerate(used):
        if not keep:
            reasons[opened[0].matched.reasons[at] or NOT_IN_OTHER] += 1
    if not used.any():
        raise UsageError("no captioned image is in all of the indexes; evaluate them one by one")
    counts = np.array([len(item.captions) for item in items])
    return Inputs(
        images=len(items),
        used=int(used.sum()),
        missing=dict(sorted(reasons.items())),
        captions=int(counts.sum()),
        captions_used=int(counts[used].sum()),
    )


def _others(
    config: EvaluationConfig, everything: Sequence[CaptionedImage], root: Path
) -> tuple[list[CaptionedImage], MatchedRows]:
    """What may be answered besides: the other splits of the file, and the further files."""
    others = list(everything) if config.split is not None else []
    for path in config.full_captions:
        others += read_captions(path, config.images)
    return others, match_items(root, others, allow_none=True)


def _evaluate_one(
    config: EvaluationConfig, opened: _Opened, asked: EvaluationSet, on_progress: OnProgress
) -> tuple[System, list[Result]]:
    model = load_search_model(opened.root, opened.manifest, opened.model_path, device=config.device, dtype=config.dtype)
    if config.rerank:
        check_reranks(model)
    embedded = _embedded(config, opened, asked, model, on_progress)
    pools = _embedding_pools(config, opened, asked, embedded)
    joint = _joint_scores(config, opened, asked, model, pools, on_progress)
    results: list[Result] = []
    for direction in config.directions:
        candidates, similarities = pools[direction].candidates, pools[direction].similarities
        weights = model.weights if direction == TEXT_TO_IMAGE else model.caption_weights
        of_images = partial(image_priors, model, asked.rows, embedded.images, candidates)
        of_captions = None  # the same at every precision
        if weights.prior and direction == IMAGE_TO_TEXT:
            of_captions = caption_priors(model, asked.captions, embedded.texts, candidates)
        scores = {}
        for source in opened.sources:
            parts = joint[source.precision][direction] @ np.array([1, weights.late, weights.pooled], dtype=np.float32)
            scores[source.precision] = fused_scores(parts, similarities, weights.similarity)
            if weights.prior:
                scores[source.precision] -= of_captions if of_captions is not None else of_images(source)
        results += _results(config, opened, direction, pools[direction], scores, _clusters(asked, direction))
    assert model.info is not None
    system = System(
        name=opened.name,
        index=str(opened.root),
        bundle=str(model.info.path),
        fingerprint=model.fingerprint,
        trained=model.trained,
        block_shape=opened.manifest.spec.block_shape,
        weights=model.weights._asdict(),
        caption_weights=model.caption_weights._asdict(),
        candidates=opened.candidates,
        queries=opened.queries,
        dtype=_dtype_name(model) if config.rerank else None,
    )
    return system, results


def _clusters(asked: EvaluationSet, direction: str) -> Ints:
    """The image that each question belongs to."""
    return asked.caption_rows[asked.query_captions] if direction == TEXT_TO_IMAGE else asked.query_rows


@dataclass(frozen=True)
class _Embedded:
    """Embeddings of the captions of `_needed` [c, e] and of the candidate images [r, e]."""

    texts: Floats
    images: Floats


def _embedded(
    config: EvaluationConfig, opened: _Opened, asked: EvaluationSet, model: ModelBundle, on_progress: OnProgress
) -> _Embedded:
    from edje_index.models.text_tower import embed_texts

    texts = embed_texts(model.text, _needed(config, asked), partial(on_progress, "captions embedded"))
    return _Embedded(texts, read_embeddings(opened.root, opened.manifest.spec, asked.rows))


def _embedding_pools(
    config: EvaluationConfig, opened: _Opened, asked: EvaluationSet, embedded: _Embedded
) -> dict[str, Pools]:
    """Pools of each direction, as large as the largest that is re-ranked."""
    texts, images = embedded.texts, embedded.images
    size = max(config.pool_sizes) if config.rerank else 1
    pools = {}
    if TEXT_TO_IMAGE in config.directions:
        wanted = texts[asked.query_captions] if IMAGE_TO_TEXT in config.directions else texts
        labels = asked.caption_rows[asked.query_captions]
        pools[TEXT_TO_IMAGE] = embedding_pools(wanted, images, labels, asked.rows, size)
        opened.candidates[TEXT_TO_IMAGE] = len(asked.rows)
    if IMAGE_TO_TEXT in config.directions:
        wanted = images[np.searchsorted(asked.rows, asked.query_rows)]
        pools[IMAGE_TO_TEXT] = embedding_pools(wanted, texts, asked.query_rows, asked.caption_rows, size)
        opened.candidates[IMAGE_TO_TEXT] = len(asked.captions)
    opened.queries = {direction: len(pool.ranks) for direction, pool in pools.items()}
    return pools


def _needed(config: EvaluationConfig, asked: EvaluationSet) -> Sequence[str]:
    """Captions to embed: all that may be answered, or only the questions where no answer is a text."""
    if IMAGE_TO_TEXT in config.directions:
        return asked.captions
    return [asked.captions[place] for place in asked.query_captions]


def _joint_scores(
    config: EvaluationConfig,
    opened: _Opened,
    asked: EvaluationSet,
    model: ModelBundle,
    pools: dict[str, Pools],
    on_progress: OnProgress,
) -> dict[str, dict[str, Floats]]:
    """Parts of the scores [q, p, 3] of every pool, by precision and direction; a pair of both is scored once."""
    used = [model.weights, model.caption_weights]
    late, pooled = any(each.late for each in used), any(each.pooled for each in used)
    pairs = {direction: _pairs(asked, direction, pool) for direction, pool in pools.items()}
    captions, rows = (np.concatenate(part) for part in zip(*pairs.values(), strict=True))
    found: dict[str, dict[str, Floats]] = {}
    for source in opened.sources:
        cache = ScoreCache(config.cache, _cache_key(opened, asked, model, source))
        scores = PairScorer(model.joint, source, asked.captions, cache, late, pooled).score(captions, rows, on_progress)
        opened.pairs += len(np.unique(pack(captions, rows)))
        ends = np.cumsum([len(part) for part, _ in pairs.values()])[:-1]
        found[source.precision] = {
            direction: part.reshape(*pools[direction].candidates.shape, -1)
            for direction, part in zip(pairs, np.split(scores, ends), strict=True)
        }
    return found


def _pairs(asked: EvaluationSet, direction: str, pool: Pools) -> tuple[Ints, Ints]:
    """(places of captions, row ids), flat, of a pool's candidates with their questions."""
    size = pool.candidates.shape[1]
    if direction == TEXT_TO_IMAGE:
        return np.repeat(asked.query_captions, size), asked.rows[pool.candidates].ravel()
    return pool.candidates.ravel(), np.repeat(asked.query_rows, size)


def _cache_key(opened: _Opened, asked: EvaluationSet, model: ModelBundle, source: TokenSource) -> dict[str, Any]:
    key = {
        "bundle": model.fingerprint,
        "index": [opened.manifest.plan, opened.manifest.model["fingerprint"], opened.manifest.spec.rows],
        "precision": [source.precision, source.simulated_from],
        "captions": hashlib.sha256(json.dumps(asked.captions).encode()).hexdigest(),
    }
    if (dtype := _dtype_name(model)) != "float32":  # scores of earlier versions have no name of it
        key["dtype"] = dtype
    return key


def _dtype_name(model: ModelBundle) -> str:
    """Of the joint encoder's matrix products."""
    return str(model.joint.compute_dtype).removeprefix("torch.")


def _results(
    config: EvaluationConfig,
    opened: _Opened,
    direction: str,
    pools: Pools,
    scores: dict[str, Floats],
    clusters: Ints,
) -> list[Result]:
    bootstrap = ClusterBootstrap(clusters, config.resamples, config.seed)
    found = _Columns(config.cutoffs, bootstrap)
    plain = found.recall(pools.ranks)
    results = [Result(opened.name, direction, plain)]
    reference = "bf16" if "bf16" in scores else next(iter(scores), None)
    for pool in config.pool_sizes if scores else ():
        in_pool = bootstrap.estimates(_PERCENT * (pools.ranks < pool)[:, None])[0]
        ranks = {
            name: ranks_after_reranking(values, pools.relevant, pool, pools.ranks) for name, values in scores.items()
        }
        for source in opened.sources:
            name = source.precision
            is_reference = name == reference
            results.append(
                Result(
                    system=opened.name,
                    direction=direction,
                    recall=found.recall(ranks[name]),
                    precision=name,
                    simulated_from=source.simulated_from,
                    bytes_per_image=source.bytes_per_image,
                    pool=pool,
                    in_pool=in_pool,
                    gain=found.difference(ranks[name], pools.ranks),
                    change=None if is_reference else found.difference(ranks[name], ranks[str(reference)]),
                    change_from=None if is_reference else reference,
                )
            )
    return results


@dataclass(frozen=True)
class _Columns:
    """Estimates of R@k, in percent, for each cutoff k."""

    cutoffs: tuple[int, ...]
    bootstrap: ClusterBootstrap

    def recall(self, ranks: Ints) -> dict[int, Estimate]:
        return self._estimates(hits(ranks, self.cutoffs).astype(np.float64))

    def difference(self, ranks: Ints, reference: Ints) -> dict[int, Estimate]:
        return self._estimates(hits(ranks, self.cutoffs).astype(np.float64) - hits(reference, self.cutoffs))

    def _estimates(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[int, Estimate]:
        return dict(zip(self.cutoffs, self.bootstrap.estimates(_PERCENT * values), strict=True))
