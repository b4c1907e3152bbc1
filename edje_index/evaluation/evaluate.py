"""Measures the recall of one or more indexes on captioned images."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edje_index.captions.matching import NAME_COLUMNS, MatchedRows, match_items
from edje_index.captions.reading import CaptionedImage, read_captions
from edje_index.evaluation.bootstrap import ClusterBootstrap
from edje_index.evaluation.config import EvaluationConfig
from edje_index.evaluation.pool_scores import Embeddings, PoolScorer, dtype_name
from edje_index.evaluation.pools import Pools, embedding_pools
from edje_index.evaluation.protocol import EvaluationSet, full_set, split_set
from edje_index.evaluation.recall import Bools, Floats, Ints
from edje_index.evaluation.recall_results import RecallTable
from edje_index.evaluation.results import Evaluation, Inputs, Result, System
from edje_index.evaluation.token_sources import TokenSource, token_sources
from edje_index.progress import OnProgress
from edje_index.scoring.cascade import Cascade
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.weights import BUNDLE_SCORE, DIRECTIONS, IMAGE_TO_TEXT, TEXT_TO_IMAGE, ScoreWeights, parse_score
from edje_index.search.reranking import check_reranks
from edje_index.search.search_model import SearchModel
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import read_all_rows
from storage_formats.reading.embeddings import read_embeddings

NOT_IN_OTHER = "not-in-another-index"


@dataclass(frozen=True)
class _OpenIndex:
    """An index to evaluate. `matched` contains the row of each captioned image in this index."""

    name: str
    root: Path
    committed: CommittedIndex
    model_path: Path | None
    sources: list[TokenSource]
    matched: MatchedRows


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
    indexes = [_open(config, name, *system, items) for name, system in _named(config.systems)]
    used = np.logical_and.reduce([index.matched.rows >= 0 for index in indexes])
    inputs = _count_inputs(items, indexes, used)
    measured = []
    for index in indexes:
        eval_set = split_set([item for item, keep in zip(items, used, strict=True) if keep], index.matched.rows[used])
        if config.full:
            eval_set = full_set(index.root, eval_set, *_further_captions(config, all_items, index.root))
        if config.queries is not None:
            eval_set = eval_set.subsampled(config.queries, config.seed)
        measured.append(_evaluate_index(config, index, eval_set, on_progress))
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
        systems=tuple(system for system, _, _ in measured),
        results=tuple(result for _, results, _ in measured for result in results),
        pairs=sum(pairs for _, _, pairs in measured),
        seconds=time.monotonic() - began,
    )


def _check(config: EvaluationConfig) -> None:
    if config.full_captions and not config.full:
        raise UsageError("full_captions has no effect if full is False: set full to True, or leave out full_captions")
    if not config.directions or not set(config.directions) <= set(DIRECTIONS):
        given = ", ".join(config.directions) or "none"
        raise UsageError(f"directions must contain one or both of {', '.join(DIRECTIONS)}; got {given}")
    if min((*config.pool_sizes, 1)) < 1:
        raise UsageError(f"every pool size must be at least 1, got {min(config.pool_sizes)}")
    if config.score != BUNDLE_SCORE and not config.rerank:
        raise UsageError("score has no effect without re-ranking: set rerank to True, or leave score out")
    if config.joint_pool is not None and not config.rerank:
        raise UsageError("joint_pool has no effect without re-ranking: set rerank to True, or leave joint_pool out")
    parse_score(config.score, ScoreWeights())  # raises an error for an invalid score before anything is read


def _named(systems: Sequence[tuple[Path, Path | None]]) -> list[tuple[str, tuple[Path, Path | None]]]:
    """Name each system after the file name of the index. Equal names get a number."""
    stems = [root.resolve().stem for root, _ in systems]
    counts = Counter(stems)
    return [
        (stem if counts[stem] == 1 else f"{stem} {stems[: at + 1].count(stem)}", system)
        for at, (stem, system) in enumerate(zip(stems, systems, strict=True))
    ]


def _open(
    config: EvaluationConfig, name: str, root: Path, model: Path | None, items: Sequence[CaptionedImage]
) -> _OpenIndex:
    """Open an index, and find the row of each captioned image."""
    # The model is loaded later, so that an index that cannot be evaluated fails early.
    index = CommittedIndex.open(root)
    sources = token_sources(root, config.precisions, simulate=config.simulate) if config.rerank else []
    matched = match_items(root, read_all_rows(index, NAME_COLUMNS), items)
    return _OpenIndex(name, root, index, model, sources, matched)


def _count_inputs(items: Sequence[CaptionedImage], indexes: Sequence[_OpenIndex], used: Bools) -> Inputs:
    if not used.any():
        raise UsageError("no image with captions is in all indexes: evaluate each index alone")
    reasons = Counter(
        indexes[0].matched.reasons[position] or NOT_IN_OTHER for position in np.flatnonzero(~used).tolist()
    )
    counts = np.array([len(item.captions) for item in items])
    return Inputs(
        images=len(items),
        used=int(used.sum()),
        missing=dict(sorted(reasons.items())),
        captions=int(counts.sum()),
        captions_used=int(counts[used].sum()),
    )


def _further_captions(
    config: EvaluationConfig, all_items: Sequence[CaptionedImage], root: Path
) -> tuple[list[CaptionedImage], MatchedRows]:
    """Read the additional candidates of the full-dataset protocol, and find the row of each captioned image."""
    items = list(all_items) if config.split is not None else []
    for path in config.full_captions:
        items += read_captions(path, config.images)
    table = read_all_rows(CommittedIndex.open(root), NAME_COLUMNS)
    return items, match_items(root, table, items, allow_none=True)


def _evaluate_index(
    config: EvaluationConfig, index: _OpenIndex, eval_set: EvaluationSet, on_progress: OnProgress
) -> tuple[System, list[Result], int]:
    """Evaluate one index. Return the description of the system, the results, and the number of scored pairs."""
    model = SearchModel.of_index(index.committed, index.model_path, device=config.device, dtype=config.dtype)
    weights = {direction: model.weights(direction, config.score) for direction in config.directions}
    if config.joint_pool is not None:
        for of_direction in weights.values():
            Cascade(FinalScore.of(of_direction), config.joint_pool)  # refuses a score that has no use for it
    embeddings = _embeddings(config, index, eval_set, model, on_progress)
    pools = _pools(config, eval_set, embeddings)
    manifest = index.committed.manifest
    index_key = [manifest.plan, manifest.model["fingerprint"], manifest.spec.rows]
    scorer = PoolScorer(
        model=model,
        weights=weights,
        eval_set=eval_set,
        embeddings=embeddings,
        pools=pools,
        pool_sizes=config.pool_sizes,
        joint_pool=config.joint_pool,
        cache=config.cache,
        index_key=index_key,
    )
    if config.rerank and scorer.reads_tokens:
        check_reranks(model)
    scores = {source.precision: scorer.score(source, on_progress) for source in index.sources}
    results: list[Result] = []
    for direction in config.directions:
        bootstrap = ClusterBootstrap(_query_images(eval_set, direction), config.resamples, config.seed)
        table = RecallTable(index.name, direction, pools[direction], config.cutoffs, bootstrap)
        results.append(table.embedding_result())
        for pool in config.pool_sizes if scores else ():
            by_precision = {precision: values[direction][pool] for precision, values in scores.items()}
            results += table.reranked_results(pool, index.sources, by_precision)
    system = _describe(config, index, model, eval_set, pools)
    return system, results, len(scores) * scorer.count_pairs() if scores else 0


def _describe(
    config: EvaluationConfig,
    index: _OpenIndex,
    model: SearchModel,
    eval_set: EvaluationSet,
    pools: dict[str, Pools],
) -> System:
    assert model.info is not None
    candidates = {TEXT_TO_IMAGE: len(eval_set.rows), IMAGE_TO_TEXT: len(eval_set.captions)}
    return System(
        name=index.name,
        index=str(index.root),
        bundle=str(model.info.path),
        fingerprint=model.fingerprint,
        trained=model.trained,
        block_shape=index.committed.manifest.spec.block_shape,
        weights={direction: model.weights(direction, config.score).to_json() for direction in pools},
        candidates={direction: candidates[direction] for direction in pools},
        queries={direction: len(pool.ranks) for direction, pool in pools.items()},
        dtype=dtype_name(model) if config.rerank else None,
    )


def _query_images(eval_set: EvaluationSet, direction: str) -> Ints:
    """Return the row id of the image of each query."""
    text_queries = direction == TEXT_TO_IMAGE
    return eval_set.caption_rows[eval_set.query_captions] if text_queries else eval_set.query_rows


def _embeddings(
    config: EvaluationConfig, index: _OpenIndex, eval_set: EvaluationSet, model: SearchModel, on_progress: OnProgress
) -> Embeddings:
    """Embed the captions, and read the embeddings of the candidate images."""
    # If images are the only candidates, only the captions that are queries are embedded.
    from edje_index.models.text_encoder import embed_texts

    captions: Sequence[str] = eval_set.captions
    if IMAGE_TO_TEXT not in config.directions:
        captions = [eval_set.captions[position] for position in eval_set.query_captions]
    texts = embed_texts(model.text, captions, on_progress)
    return Embeddings(texts, read_embeddings(index.committed, eval_set.rows))


def _pools(config: EvaluationConfig, eval_set: EvaluationSet, embeddings: Embeddings) -> dict[str, Pools]:
    """Return the pools of each direction. Each pool has as many candidates as the largest pool size."""
    texts, images = embeddings.texts, embeddings.images
    size = max(config.pool_sizes) if config.rerank else 1
    pools = {}
    if TEXT_TO_IMAGE in config.directions:
        queries: Floats = texts[eval_set.query_captions] if IMAGE_TO_TEXT in config.directions else texts
        query_images = _query_images(eval_set, TEXT_TO_IMAGE)
        pools[TEXT_TO_IMAGE] = embedding_pools(queries, images, query_images, eval_set.rows, size)
    if IMAGE_TO_TEXT in config.directions:
        queries = images[np.searchsorted(eval_set.rows, eval_set.query_rows)]
        pools[IMAGE_TO_TEXT] = embedding_pools(queries, texts, eval_set.query_rows, eval_set.caption_rows, size)
    return pools
