"""Measures the recall of one or more indexes on captioned images."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from edje_index.bundles.info import matching_bundle
from edje_index.captions.matching import NAME_COLUMNS, match_items
from edje_index.captions.reading import read_captions
from edje_index.evaluation.bootstrap import ClusterBootstrap, Estimate
from edje_index.evaluation.pool_scores import score_pools
from edje_index.evaluation.protocol import EvaluationSet, full_set, split_set
from edje_index.evaluation.recall import Floats, Ints, embedding_pools, hits, ranks_after_reranking
from edje_index.evaluation.results import Evaluation, EvaluationConfig, Inputs, Result, System
from edje_index.evaluation.token_sources import TokenSource, token_sources
from edje_index.models.text_encoder import embed_texts
from edje_index.progress import OnProgress
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.parts import reads_tokens
from edje_index.scoring.weights import BUNDLE_SCORE, DIRECTIONS, IMAGE_TO_TEXT, TEXT_TO_IMAGE, ScoreWeights, parse_score
from edje_index.search.search_model import SearchModel
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import read_all_rows
from storage_formats.reading.embeddings import read_embeddings

NOT_IN_OTHER = "not-in-another-index"
_PERCENT = 100.0
_REFERENCE = "bf16"


def evaluate(config: EvaluationConfig, on_progress: OnProgress = lambda activity, done, total: None) -> Evaluation:
    """Measure the recall of one or more indexes on captioned images.

    Example:
        >>> from pathlib import Path
        >>> from edje_index import EvaluationConfig, evaluate
        >>> config = EvaluationConfig(
        ...     systems=((Path("photos.edje"), None),),
        ...     captions=Path("captions.jsonl"),
        ...     images=Path("photos"),
        ...     pools=(3,),
        ...     resamples=0,
        ... )
        >>> for result in evaluate(config).results:
        ...     print(result.direction, result.precision, result.pool, 0 <= result.recall[5].value <= 100)
        t2i None None True
        t2i bf16 3 True
        i2t None None True
        i2t bf16 3 True

    Raises:
        UsageError: settings contradict each other, the captions cannot be read, no caption matches an image, or an
            index lacks a requested precision.
        ModelError: a bundle is missing, did not build the index, or cannot compute the score.
    """
    began = time.monotonic()
    _check(config)
    all_items = read_captions(config.captions, config.images)
    items = all_items if config.split is None else read_captions(config.captions, config.images, config.split)
    # Every index is opened before a model is loaded, so that an index that cannot be evaluated fails early.
    indexes = [CommittedIndex.open(root) for root, _ in config.systems]
    sources = [token_sources(index, config.precisions) if config.rerank else [] for index in indexes]
    tables = [read_all_rows(index, NAME_COLUMNS) for index in indexes]
    matched = [match_items(index.root, table, items) for index, table in zip(indexes, tables, strict=True)]
    used = np.logical_and.reduce([rows.rows >= 0 for rows in matched])
    if not used.any():
        raise UsageError("no image with captions is in all indexes: evaluate each index alone")
    used_items = [item for item, is_used in zip(items, used, strict=True) if is_used]
    reasons = Counter(matched[0].reasons[position] or NOT_IN_OTHER for position in np.flatnonzero(~used).tolist())
    inputs = Inputs(
        images=len(items),
        used=len(used_items),
        missing=dict(sorted(reasons.items())),
        captions=sum(len(item.captions) for item in items),
        captions_used=sum(len(item.captions) for item in used_items),
    )
    stems = [root.resolve().stem for root, _ in config.systems]
    names = [
        stem if stems.count(stem) == 1 else f"{stem} {stems[: at + 1].count(stem)}" for at, stem in enumerate(stems)
    ]
    systems: list[System] = []
    results: list[Result] = []
    pairs = 0
    for at, (name, index) in enumerate(zip(names, indexes, strict=True)):
        model = SearchModel(matching_bundle(index, config.systems[at][1]), device=config.device, dtype=config.dtype)
        eval_set = split_set(used_items, matched[at].rows[used])
        if config.full:
            others = all_items if config.split is not None else []
            rows = match_items(index.root, tables[at], others, allow_none=True)
            eval_set = full_set(index, eval_set, others, rows)
        if config.queries is not None:
            eval_set = eval_set.subsampled(config.queries, config.seed)
        system, its_results, its_pairs = _evaluate_index(
            config, index, name, str(config.systems[at][0]), eval_set, model, sources[at], on_progress
        )
        systems.append(system)
        results += its_results
        pairs += its_pairs
    return Evaluation(
        protocol="full" if config.full else "split",
        captions=str(config.captions),
        split=config.split,
        cutoffs=config.cutoffs,
        pools=config.pool_sizes if config.rerank else (),
        joint_pool=config.joint_pool,
        resamples=config.resamples,
        seed=config.seed,
        inputs=inputs,
        systems=tuple(systems),
        results=tuple(results),
        pairs=pairs,
        seconds=time.monotonic() - began,
    )


def _check(config: EvaluationConfig) -> None:
    if not config.directions or not set(config.directions) <= set(DIRECTIONS):
        given = ", ".join(config.directions) or "none"
        raise UsageError(f"directions must contain one or both of {', '.join(DIRECTIONS)}; got {given}")
    if min((*config.pool_sizes, 1)) < 1:
        raise UsageError(f"every pool size must be at least 1, got {min(config.pool_sizes)}")
    if config.score != BUNDLE_SCORE and not config.rerank:
        raise UsageError(
            "score has no effect without re-ranking: set rerank to True, or leave score out", parameter="score"
        )
    if config.joint_pool is not None and not config.rerank:
        raise UsageError(
            "joint_pool has no effect without re-ranking: set rerank to True, or leave joint_pool out",
            parameter="joint_pool",
        )
    parse_score(config.score, ScoreWeights())  # raises an error for an invalid score before anything is read


def _evaluate_index(
    config: EvaluationConfig,
    index: CommittedIndex,
    name: str,
    path: str,
    eval_set: EvaluationSet,
    model: SearchModel,
    sources: list[TokenSource],
    on_progress: OnProgress,
) -> tuple[System, list[Result], int]:
    """Evaluate one index. Return the description of the system, the results, and the number of scored pairs."""
    weights = {direction: model.weights(direction, config.score) for direction in config.directions}
    scores = {direction: FinalScore.of(weights[direction], config.joint_pool) for direction in config.directions}
    if config.rerank and any(reads_tokens(score.parts, direction) for direction, score in scores.items()):
        model.check_reranks()

    # If images are the only candidates, only the captions that are queries are embedded.
    text_queries = eval_set.query_captions
    captions = eval_set.captions
    if IMAGE_TO_TEXT not in config.directions:
        captions, text_queries = tuple(captions[at] for at in text_queries), np.arange(len(text_queries))
    texts = embed_texts(model.text, captions, on_progress)
    images = read_embeddings(index, eval_set.rows)
    size = max(config.pool_sizes) if config.rerank else 1
    query_images = {TEXT_TO_IMAGE: eval_set.caption_rows[eval_set.query_captions], IMAGE_TO_TEXT: eval_set.query_rows}
    pools = {}
    for direction in config.directions:
        labels = query_images[direction]
        if direction == TEXT_TO_IMAGE:
            pools[direction] = embedding_pools(texts[text_queries], images, labels, eval_set.rows, size)
        else:
            queries = images[np.searchsorted(eval_set.rows, eval_set.query_rows)]
            pools[direction] = embedding_pools(queries, texts, labels, eval_set.caption_rows, size)

    manifest, pairs = index.manifest, 0
    finals: dict[str, dict[str, dict[int, Floats]]] = {}
    for source in sources:
        finals[source.precision], scored = score_pools(
            model.score_models,
            weights,
            eval_set,
            (texts, images),
            pools,
            source,
            joint_pool=config.joint_pool,
            pool_sizes=config.pool_sizes,
            cache=config.cache,
            key={
                "bundle": model.fingerprint,
                "index": [manifest.plan, manifest.model["fingerprint"], manifest.spec.rows],
                "precision": [source.precision, source.simulated_from],
                "dtype": _dtype(model),
            },
            on_progress=on_progress,
        )
        pairs += scored

    results = []
    for direction, pool in pools.items():
        bootstrap = ClusterBootstrap(query_images[direction], config.resamples, config.seed)
        results.append(Result(name, direction, _recall(config, bootstrap, pool.ranks)))
        for size in config.pool_sizes if finals else ():
            in_pool = bootstrap.estimates(_PERCENT * (pool.ranks < size)[:, None])[0]
            ranks = {
                precision: ranks_after_reranking(values[direction][size], pool.relevant, size, pool.ranks)
                for precision, values in finals.items()
            }
            reference = _REFERENCE if _REFERENCE in ranks else next(iter(ranks))
            for source in sources:
                its_ranks, is_reference = ranks[source.precision], source.precision == reference
                result = Result(
                    system=name,
                    direction=direction,
                    recall=_recall(config, bootstrap, its_ranks),
                    precision=source.precision,
                    simulated_from=source.simulated_from,
                    bytes_per_image=source.bytes_per_image,
                    pool=size,
                    in_pool=in_pool,
                    gain=_recall(config, bootstrap, its_ranks, pool.ranks),
                    change=None if is_reference else _recall(config, bootstrap, its_ranks, ranks[reference]),
                    change_from=None if is_reference else reference,
                )
                results.append(result)

    candidates = {TEXT_TO_IMAGE: len(eval_set.rows), IMAGE_TO_TEXT: len(eval_set.captions)}
    system = System(
        name=name,
        index=path,
        bundle=str(model.info.path),
        fingerprint=model.fingerprint,
        trained=model.trained,
        block_shape=manifest.spec.block_shape,
        weights={direction: its_weights.to_json() for direction, its_weights in weights.items()},
        candidates={direction: candidates[direction] for direction in pools},
        queries={direction: len(pool.ranks) for direction, pool in pools.items()},
        dtype=_dtype(model) if config.rerank else None,
    )
    return system, results, pairs


def _recall(
    config: EvaluationConfig, bootstrap: ClusterBootstrap, ranks: Ints, reference: Ints | None = None
) -> dict[int, Estimate]:
    """Return R@k by k, or the difference to R@k of the ranks `reference`."""
    values = hits(ranks, config.cutoffs).astype(np.float64)
    if reference is not None:
        values -= hits(reference, config.cutoffs)
    return dict(zip(config.cutoffs, bootstrap.estimates(_PERCENT * values), strict=True))


def _dtype(model: SearchModel) -> str:
    """Return the name of the data type of matrix products in the joint encoder."""
    return str(model.joint.compute_dtype).removeprefix("torch.")
