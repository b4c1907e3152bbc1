"""The command `edje-index search`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edje_index.scoring.weights import BUNDLE_SCORE, EMBEDDING
from pipelines.cli.options import (
    FILE,
    POSITIVE,
    device_option,
    dtype_option,
    joint_pool_option,
    json_option,
    location,
    model_option,
    read_precision_option,
    score_option,
    where_option,
)
from pipelines.cli.output import note, print_json, print_line
from pipelines.cli.search_queries import hint_at_image, prompt_for_queries, read_queries, read_texts
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.scoring.weights import ScoreWeights
    from edje_index.search.hits import Hit, Hits
    from edje_index.search.token_index import TokenIndex

_QUERIES_AT_ONCE = 64  # their hits appear together


@dataclass(frozen=True)
class _Request:
    """Options of one search."""

    k: int
    pool: int
    joint_pool: int | None
    score: str
    rerank: bool
    where: str | None
    texts: Path | None
    html: Path | None
    open_page: bool
    as_json: bool


@click.command()
@click.argument("index", type=location)
@click.argument("text", required=False)
@click.option(
    "--queries",
    type=FILE,
    help="File of queries: one query per line, or a .jsonl file of objects with the key `query`.",
)
@click.option(
    "--image",
    type=FILE,
    help="Image file to search with. Hits are sorted by embedding similarity, without re-ranking.",
)
@click.option(
    "--texts",
    type=FILE,
    help="File with one text per line. With --image, find the texts that describe the image best.",
)
@click.option("-k", "k", type=POSITIVE, default=10, show_default=True, help="Number of hits.")
@click.option("--pool", type=POSITIVE, default=100, show_default=True, help="Number of candidates to re-rank.")
@joint_pool_option
@score_option
@click.option(
    "--rerank/--no-rerank",
    default=True,
    help="Sort the candidates by the final score, or by embedding similarity alone.",
)
@where_option
@read_precision_option
@model_option
@device_option
@dtype_option
@click.option(
    "--html",
    type=FILE,
    help="Also write an HTML page that shows the hits before and after re-ranking.",
)
@click.option("--open", "open_page", is_flag=True, help="Open the page of --html in the browser.")
@json_option
def search(
    index: Path | str,
    text: str | None,
    queries: Path | None,
    image: Path | None,
    precision: str | None,
    model: Path | None,
    device: str,
    dtype: str,
    **options: Any,
) -> None:
    """Find the images that match TEXT best. Without TEXT, --queries and --image, prompt for queries.

    The candidates are the rows whose embeddings are nearest to the embedding of TEXT. The candidates are then sorted by
    the final score, a weighted sum of several scores. The weights are in the model bundle; --score sets other weights.

    With --json, each hit has the final score and its parts before weighting. `embedding_score` is the cosine similarity
    of the embeddings. `joint_score` is the weighted sum of logit, late interaction and pooled similarity. With
    --queries, --json prints one line per query.

    With --image and --texts, the hits are texts, sorted by the final score for image-to-text search.

    \b
    Examples:
      edje-index search photos.edje "two dogs play in the snow"
      edje-index search photos.edje "a red car" -k 3 --pool 500 --json
      edje-index search photos.edje "a red car" --score logit
      edje-index search photos.edje "a red car" --score logit=1,embedding=20
      edje-index search photos.edje "a red car" --joint-pool 20
      edje-index search photos.edje "a red car" --precision fp8
      edje-index search photos.edje "a red car" --where "width > 800 and licence = 'cc0'"
      edje-index search photos.edje "a red car" --html car.html --open
      edje-index search photos.edje --queries queries.txt --json
      edje-index search photos.edje --image car.jpg
      edje-index search photos.edje --image car.jpg --texts captions.txt
    """
    request = _Request(**options)
    _check(request)
    _check_query(request, text=text, queries=queries, image=image, precision=precision)
    texts = None if request.texts is None else read_texts(request.texts)
    batches = [[text]] if text is not None else _batches(queries)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for one query, threads that spin between products cost more
    from storage_formats.format.mirror import open_index

    manifest = open_index(index).manifest  # may raise, so it comes before torch is loaded
    from edje_index.search.token_index import TokenIndex

    started = time.perf_counter()
    opened = TokenIndex.open(index, model, precision=precision, device=device, dtype=dtype, score=request.score)
    loading = time.perf_counter() - started
    if not manifest.model.get("trained", True):
        note("note: this model is untrained: the order of these hits has no meaning")
    if image is not None:
        _answer_image(opened, image, texts, request)
        return
    for batch in batches:
        _answer(opened, batch, request, loading, heading=text is None)
    if request.rerank and not request.as_json:
        note(_explanation(opened.model.weights("t2i", request.score)))


def _batches(queries: Path | None) -> Iterable[list[str]]:
    """Return the queries in batches: large batches from a file, or single queries from the prompt."""
    if queries is None:
        return ([query] for query in prompt_for_queries())
    texts = read_queries(queries)
    return [texts[start : start + _QUERIES_AT_ONCE] for start in range(0, len(texts), _QUERIES_AT_ONCE)]


def _answer(opened: TokenIndex, texts: list[str], request: _Request, loading: float, *, heading: bool) -> None:
    for text in texts:
        hint_at_image(text)
    pool = max(request.pool, request.k)
    k = pool if request.html else request.k
    results = opened.search(texts, k, pool, rerank=request.rerank, where=request.where, joint_pool=request.joint_pool)
    for text, candidates in zip(texts, results, strict=True):
        if request.html is not None:
            _write_page(request.html, opened, candidates, request=request, query=text, loading=loading)
        _show(text, candidates.first(request.k), request, heading=heading)


def _show(query: str, hits: Hits, request: _Request, *, heading: bool) -> None:
    if request.as_json:
        stages = {stage: round(1000 * seconds, 3) for stage, seconds in hits.stages.items()}
        print_json({"query": query, "hits": [asdict(hit) for hit in hits], "stages_ms": stages})
        return
    if heading:
        print_line(f"query: {query}")
    _print(hits)


def _answer_image(opened: TokenIndex, image: Path, texts: list[str] | None, request: _Request) -> None:
    """Print the images that are most similar to an image or, if there are `texts`, those that describe it best."""
    if texts is None:
        _show(str(image), opened.search_image(image, request.k, where=request.where), request, heading=False)
        return
    pool = max(request.pool, request.k)
    hits = opened.search_texts(image, texts, request.k, pool, score=None if request.rerank else EMBEDDING)
    if request.as_json:
        print_json({"query": str(image), "hits": [asdict(hit) for hit in hits]})
        return
    print_line(f"{'score':>9} {'embedding':>10}  text")
    for hit in hits:
        print_line(f"{hit.score:>9.4f} {hit.embedding_score:>10.4f}  {hit.text}")


def _check_query(
    request: _Request, *, text: str | None, queries: Path | None, image: Path | None, precision: str | None
) -> None:
    """Raise UsageError if several kinds of query are given, or an option does not apply to the query."""
    if sum(query is not None for query in (text, queries, image)) > 1:
        raise UsageError("give only one of TEXT, --queries and --image")
    if request.html is not None and text is None:
        raise UsageError("--html shows the hits of one TEXT: give TEXT, or leave out --html")
    if image is not None and precision is not None:
        raise UsageError("--precision has no effect with --image, which is encoded now: leave out --precision")
    if request.texts is not None:
        _check_texts(request, image)
    elif image is not None:
        _check_unused(request, "with --image, which compares embeddings alone")


def _check_texts(request: _Request, image: Path | None) -> None:
    """Raise UsageError if an option does not apply to image-to-text search."""
    if image is None:
        raise UsageError("--texts are ranked for an image: add --image FILE")
    for option, value in (("--where", request.where), ("--joint-pool", request.joint_pool)):
        if value is not None:
            raise UsageError(f"{option} has no effect with --texts: leave out {option}")


def _check(request: _Request) -> None:
    if request.rerank and request.pool < request.k:
        raise UsageError(
            f"--pool {request.pool} is smaller than -k {request.k}: only candidates can become hits, so raise --pool"
        )
    if not request.rerank:
        _check_unused(request, "with --no-rerank")
    if request.html is not None and not request.rerank:
        raise UsageError("--html compares the order before and after re-ranking: leave out --html or --no-rerank")
    if request.open_page and request.html is None:
        raise UsageError("--open opens the page that --html writes: add --html FILE")


def _check_unused(request: _Request, why: str) -> None:
    """Raise UsageError if an option is given that needs re-ranking. `why` says why there is no re-ranking."""
    for option, is_given in (("--score", request.score != BUNDLE_SCORE), ("--joint-pool", request.joint_pool)):
        if is_given:
            raise UsageError(f"{option} has no effect {why}: leave out {option}")


def _write_page(
    path: Path,
    opened: TokenIndex,
    candidates: Hits,
    *,
    request: _Request,
    query: str,
    loading: float,
) -> None:
    from pipelines.pages.search_page import SearchContext, search_page
    from storage_formats.atomic import write_bytes_atomic

    context = SearchContext(
        root=opened.root,
        query=query,
        precision=opened.precision,
        weights=opened.model.weights("t2i", request.score),
        trained=opened.model.trained,
        timings={"load index and model": loading, **candidates.stages},
    )
    write_bytes_atomic(path, search_page(candidates, request.k, context).encode())
    note(f"page: {path}")
    if request.open_page:
        click.launch(str(path.resolve()))


def _explanation(weights: ScoreWeights) -> str:
    return (
        f"score = {weights.described()}; scores order the hits of one query and cannot be compared between queries. "
        "joint: share of the score from logit, late interaction and pooled similarity. "
        "embedding: cosine similarity of the embeddings."
    )


def _print(hits: list[Hit]) -> None:
    print_line(f"{'score':>9} {'joint':>9} {'embedding':>10} {'row':>9}  image")
    for hit in hits:
        joint = "-" if hit.joint_score is None else f"{hit.joint_score:.4f}"
        print_line(f"{hit.score:>9.4f} {joint:>9} {hit.embedding_score:>10.4f} {hit.row_id:>9}  {hit.uri}")
