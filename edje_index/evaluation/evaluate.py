"""Measures the recall of an index on captioned images."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from edje_index.bundles.info import matching_bundle
from edje_index.captions.matching import match_items, stored_captions
from edje_index.captions.reading import CaptionedImage, read_captions
from edje_index.evaluation.pools import (
    full_set,
    score_pairs,
    split_set,
    token_sources,
)
from edje_index.evaluation.recall import (
    ClusterBootstrap,
    Estimate,
    hits,
    ranks_after_reranking,
)
from edje_index.progress import OnProgress
from edje_index.scoring.parts import reads_tokens
from edje_index.scoring.weights import (
    BUNDLE_SCORE,
    DIRECTIONS,
    EMBEDDING,
    IMAGE_TO_TEXT,
    JOINT_PARTS,
    TEXT_TO_IMAGE,
    ScoreWeights,
    parse_score,
)
from edje_index.search.search_model import SearchModel
from storage_formats.arguments import as_count, as_list, as_path
from storage_formats.arrays import Floats, Ints
from storage_formats.atomic import Json
from storage_formats.cache import cache_directory
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings

_CUTOFFS = (1, 5, 10)
_FULL_CUTOFFS = (5, 10, 20)
_POOLS = (10, 20, 50)
_FULL_POOLS = (100,)
_PERCENT = 100.0
# With fewer queries, there is no advice. If none of 300 first hits changes, at most 1 %
# of all first hits change, with a confidence of 95 %.
_MIN_QUERIES = 300
# The advice accepts a precision that loses at most this number of points of recall.
_ACCEPTED_LOSS = 1.0


@dataclass(frozen=True)
class Result:
    """Recall in percent, for one direction, precision and pool size.

    In the result for the embeddings alone, `precision` and all fields after it are
    None.

    Attributes:
        direction: "t2i" or "i2t".
        recall: R@k by cutoff k.
        simulated_from: stored precision that was converted to `precision` in memory;
            None if `precision` is stored.
        bytes_per_image: length of a record of `precision` in bytes.
        pool: number of candidates that were re-ranked.
        in_pool: percentage of queries with a relevant candidate in the pool.
        gain: R@k minus R@k of the embeddings alone, by cutoff k.
        change: R@k minus R@k with the precision `change_from`, by cutoff k.
        change_from: reference precision of `change`; None if `precision` is the
            reference precision.
    """

    direction: str
    recall: dict[int, Estimate]
    precision: str | None = None
    simulated_from: str | None = None
    bytes_per_image: int | None = None
    pool: int | None = None
    in_pool: Estimate | None = None
    gain: dict[int, Estimate] | None = None
    change: dict[int, Estimate] | None = None
    change_from: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """The settings and results of an evaluation.

    Attributes:
        inputs: number of `images` with captions and of their `captions`, and how many
            of both are in the index, and so are evaluated: `used` and `captions_used`.
            `missing` has the numbers of the other images by the reason why they are not
            in the index.
        name: name of the index in reports.
        index: path of the index, as the caller gave it.
        bundle: path of the bundle.
        fingerprint: fingerprint of the bundle.
        trained: False if the weights of the bundle are random.
        block_shape: shape of a block, (m, d): number of tokens and width of a token.
        weights: weights of the final score by direction, see
            `scoring.weights.ScoreWeights`.
        candidates: number of candidates by direction.
        queries: number of queries by direction.
        dtype: data type of the joint encoder's matrix products.
    """

    protocol: str
    captions: str
    split: str | None
    cutoffs: tuple[int, ...]
    pools: tuple[int, ...]
    resamples: int
    seed: int
    inputs: Json
    name: str
    index: str
    bundle: str
    fingerprint: str
    trained: bool
    block_shape: tuple[int, int]
    weights: dict[str, Json]
    candidates: dict[str, int]
    queries: dict[str, int]
    dtype: str
    results: tuple[Result, ...]
    seconds: float

    def to_json(self) -> Json:
        """Return the evaluation as plain JSON values. Recall is in percent."""
        value = asdict(self)
        results = [
            {name: member for name, member in result.items() if member is not None}
            for result in value["results"]
        ]
        return {**value, "results": results, "unit": "percent", "advice": self.advice}

    @property
    def advice(self) -> str | None:
        """A sentence that names the precision to keep: the smallest one whose loss of
        recall in text-to-image search is at most 1 point at the upper end of its
        interval. None if no precisions were compared.
        """
        results = [
            result
            for result in self.results
            if result.direction == TEXT_TO_IMAGE
            and result.pool == max(self.pools, default=None)
        ]
        if len(results) < 2 or not self.trained:
            return None
        queries = self.queries[TEXT_TO_IMAGE]
        if queries < _MIN_QUERIES:
            return (
                f"no advice: {queries} queries are too few, at least {_MIN_QUERIES} are"
                " needed"
            )
        cutoff = self.cutoffs[0]
        if max(self.pools) <= cutoff:
            return f"no advice: a pool of {cutoff} cannot change R@{cutoff}"
        chosen = ""
        refused = ""
        # The largest precision comes first.
        for result in results:
            size = (result.bytes_per_image or 0) / 1000
            change = (result.change or {}).get(cutoff, Estimate(0.0))
            low, high = change.bounds
            amount = (
                f"{change.value:+.1f} points of R@{cutoff} ({low:+.1f} to {high:+.1f})"
            )
            if low >= -_ACCEPTED_LOSS:
                chosen = f"keep {result.precision}: {size:.1f} kB per image, {amount}"
                refused = ""
            elif not refused:
                refused = f"; {result.precision} would change {amount}"
        return f"{chosen}{refused}, compared with {results[0].precision}"


def evaluate(
    index: str | Path,
    captions: str | Path | None = None,
    *,
    model: Path | None = None,
    images: Path | None = None,
    split: str | None = None,
    precisions: Sequence[str] = (),
    pools: Sequence[int] = (),
    full: bool = False,
    score: str | ScoreWeights = BUNDLE_SCORE,
    resamples: int = 1000,
    queries: int | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    on_progress: OnProgress = lambda activity, done, total: None,
) -> Evaluation:
    """Measure the recall of an index on captioned images, by the embeddings alone and
    after re-ranking. `edje_index.evaluation.pools` describes the protocols.

    Args:
        index: directory of the index.
        captions: caption file, see `captions.reading.read_captions`. None for the
            captions that the index holds.
        model: directory of the model bundle. None for the bundle that built the index.
        images: base directory of relative image paths. None for the directory of
            `captions`.
        split: use only this split of the captions. With `full`, the split limits only
            the queries. None for all captions.
        precisions: precision of the tokens to measure; repeatable. Stored tokens are
            converted in memory to a precision that the index does not store. The most
            accurate stored precision is always measured, as the reference. If there are
            none, all stored precisions are measured.
        pools: number of candidates to re-rank; repeatable. If there are none, they are
            10, 20 and 50, and with `full` 100.
        full: use all images of the index and all captions as candidates, and measure
            recall at 5, 10 and 20.
        score: final score for re-ranking: "bundle" (weighted sum with the weights of
            the bundle), or PART=WEIGHT,... (your own weights), see `TokenIndex.open`.
            With "embedding", nothing is re-ranked.
        resamples: number of bootstrap resamples; 0 for no confidence intervals.
        queries: maximum number of queries per direction, sampled at random. None for
            all queries.
        seed: seed of the query sample and of the bootstrap.
        device: device that runs the model. auto uses cuda if a CUDA device is
            available.
        dtype: data type of matrix products in the joint encoder: "auto", "float32" or
            "bfloat16".
        on_progress: called with the progress. An exception raised by `on_progress`
            stops this function.

    Examples:
        >>> from pathlib import Path
        >>> from edje_index import evaluate
        >>> evaluation = evaluate(
        ...     "photos.edje",
        ...     "captions.jsonl",
        ...     images=Path("photos"),
        ...     pools=(3,),
        ...     resamples=0,
        ... )
        >>> for result in evaluation.results:
        ...     recall = result.recall[5].value
        ...     print(result.direction, result.pool, 0 <= recall <= 100)
        t2i None True
        t2i 3 True
        i2t None True
        i2t 3 True

    Raises:
        UsageError: an argument is invalid, the captions cannot be read, no caption
            matches an image, or the index lacks a requested precision.
        ModelError: the bundle is missing, did not build the index, or cannot compute
            the score.
    """
    began = time.monotonic()
    cutoffs = _FULL_CUTOFFS if full else _CUTOFFS
    sizes = as_list(pools, "pools", "integers") or (_FULL_POOLS if full else _POOLS)
    pools = tuple(sorted({as_count(size, "pools") for size in sizes}))
    precisions = as_list(precisions, "precisions", "strings")
    resamples = as_count(resamples, "resamples", 0)
    seed = as_count(seed, "seed", 0)
    if queries is not None:
        queries = as_count(queries, "queries")
    if captions is not None:
        as_path(captions, "captions")
    # An invalid score raises an error here, before anything is read.
    parse_score(score, ScoreWeights())
    opened = CommittedIndex.open(index)
    if captions is None and images is not None:
        raise UsageError(
            "images is the base directory of a caption file; give captions"
        )

    def items_of(part: str | None) -> list[CaptionedImage]:
        if captions is None:
            return stored_captions(opened, part)
        return read_captions(captions, images, part)

    items = items_of(split)
    sources = token_sources(opened, precisions)
    rows, missing = match_items(opened, items)
    used_items = [item for item, row in zip(items, rows, strict=True) if row >= 0]
    used_rows = rows[rows >= 0]
    inputs = {
        "images": len(items),
        "used": len(used_items),
        "missing": missing,
        "captions": sum(len(item.captions) for item in items),
        "captions_used": sum(len(item.captions) for item in used_items),
    }
    bundle = SearchModel(matching_bundle(opened, model), device=device, dtype=dtype)
    eval_set = split_set([item.captions for item in used_items], used_rows)
    if full:
        # Without a split, `eval_set` already has all captions.
        others = [] if split is None else items_of(None)
        eval_set = full_set(
            opened,
            eval_set,
            others,
            match_items(opened, others, allow_none=True)[0],
        )
    if queries is not None:
        eval_set = eval_set.subsampled(queries, seed)

    weights = {direction: bundle.weights(direction, score) for direction in DIRECTIONS}
    if any(reads_tokens(each.parts) for each in weights.values()):
        bundle.check_reranks()
    # For the embedding similarity alone, nothing is re-ranked and no tokens are read.
    if all(each.parts == (EMBEDDING,) for each in weights.values()):
        pools = ()
        sources = []

    embeddings = (
        read_embeddings(opened, eval_set.rows),
        bundle.text.encode(eval_set.captions, on_progress=on_progress),
    )
    nearest = eval_set.pools(*embeddings, max((*pools, 1)))
    used_parts = {part for each in weights.values() for part in each.parts}
    joint_parts = [part for part in JOINT_PARTS if part in used_parts]
    finals: dict[str, dict[str, Floats]] = {}

    def report(activity: str, done: int, total: int) -> None:
        # The same pairs are scored in each precision.
        on_progress(activity, len(finals) * total + done, len(sources) * total)

    names = ", ".join(source.codec.name for source in sources)
    # A user without a directory for cached files keeps no scores.
    folder = Path(os.devnull)
    with contextlib.suppress(UsageError):
        folder = cache_directory() / "scores"
    manifest = opened.manifest
    identity = (
        f"{bundle.info.fingerprint} {manifest.plan} {manifest.snapshot.number} {device}"
        f" {dtype}"
    )
    for source in sources:
        parts = score_pairs(
            bundle.scorer,
            joint_parts,
            eval_set,
            nearest,
            source.fetch,
            report,
            f"pairs scored in {names}",
            folder,
            f"{identity} {source.codec.name}",
        )
        finals[source.codec.name] = {
            direction: weights[direction].sum(values)
            for direction, values in parts.items()
        }
    # The other precisions are compared with the most accurate one, which is the first.
    reference = next(iter(finals), "")
    results = []
    for direction, pool in nearest.items():
        bootstrap = ClusterBootstrap(pool.query_labels, resamples, seed)
        results.append(Result(direction, _recall(bootstrap, cutoffs, pool.ranks)))
        for size in pools:
            in_pool = bootstrap.estimates(_PERCENT * (pool.ranks < size)[:, None])[0]
            ranks = {
                precision: ranks_after_reranking(
                    values[direction], pool.relevant, size, pool.ranks
                )
                for precision, values in finals.items()
            }
            for source in sources:
                precision = source.codec.name
                change = change_from = None
                if precision != reference:
                    change_from = reference
                    change = _recall(
                        bootstrap, cutoffs, ranks[precision], ranks[reference]
                    )
                result = Result(
                    direction=direction,
                    recall=_recall(bootstrap, cutoffs, ranks[precision]),
                    precision=precision,
                    simulated_from=source.simulated_from,
                    bytes_per_image=source.codec.record_bytes,
                    pool=size,
                    in_pool=in_pool,
                    gain=_recall(bootstrap, cutoffs, ranks[precision], pool.ranks),
                    change=change,
                    change_from=change_from,
                )
                results.append(result)

    return Evaluation(
        protocol="full" if full else "split",
        captions="of the index" if captions is None else str(captions),
        split=split,
        cutoffs=cutoffs,
        pools=pools,
        resamples=resamples,
        seed=seed,
        inputs=inputs,
        name=Path(index).resolve().stem,
        index=str(index),
        bundle=str(bundle.info.path),
        fingerprint=bundle.info.fingerprint,
        trained=bundle.info.trained,
        block_shape=opened.manifest.spec.block_shape,
        weights={
            direction: its_weights.to_json()
            for direction, its_weights in weights.items()
        },
        candidates={
            TEXT_TO_IMAGE: len(eval_set.rows),
            IMAGE_TO_TEXT: len(eval_set.captions),
        },
        queries={direction: len(pool.ranks) for direction, pool in nearest.items()},
        dtype=str(bundle.joint.compute_dtype).removeprefix("torch."),
        results=tuple(results),
        seconds=time.monotonic() - began,
    )


def _recall(
    bootstrap: ClusterBootstrap,
    cutoffs: Sequence[int],
    ranks: Ints,
    reference: Ints | None = None,
) -> dict[int, Estimate]:
    """Return R@k of `ranks` in percent, by cutoff k. With `reference`, return R@k of
    `ranks` minus R@k of `reference`.
    """
    values = hits(ranks, cutoffs).astype(np.float64)
    if reference is not None:
        values -= hits(reference, cutoffs)
    return dict(zip(cutoffs, bootstrap.estimates(_PERCENT * values), strict=True))
