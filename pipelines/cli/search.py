"""`edje-index search`."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edje_index.scoring.weights import BUNDLE_SCORE
from pipelines.cli.output import dtype_option, json_option, note, print_json, print_line
from pipelines.cli.score_option import score_option
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.scoring.weights import ScoreWeights
    from edje_index.search.hits import Hit
    from edje_index.search.token_index import TokenIndex

_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("index", type=click.Path(path_type=Path))
@click.argument("text")
@click.option("-k", "k", type=_POSITIVE, default=10, show_default=True, help="Number of hits.")
@click.option("--pool", type=_POSITIVE, default=100, show_default=True, help="Number of candidates to re-rank.")
@score_option
@click.option("--rerank/--no-rerank", default=True, help="Re-rank the candidates, or keep the order of the embeddings.")
@click.option("--model", type=click.Path(path_type=Path), help="Model bundle.  [default: the one that built INDEX]")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device of the model.",
)
@dtype_option
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a page with the pictures before and after re-ranking to this file.",
)
@click.option("--open", "open_page", is_flag=True, help="Open the page of --html in the browser.")
@json_option
def search(
    index: Path,
    text: str,
    k: int,
    pool: int,
    score: str,
    rerank: bool,
    model: Path | None,
    device: str,
    dtype: str,
    html: Path | None,
    open_page: bool,
    as_json: bool,
) -> None:
    """Find the images that match TEXT best.

    The candidates are the rows whose embeddings are nearest to that of TEXT. The tokens of the candidates are fetched,
    and the candidates are sorted by the final score, a weighted sum of parts. The model bundle holds the weights;
    --score replaces them. An imported checkpoint scores by the joint encoder's logit alone, as published.

    With --json each hit has `score`, its unweighted `parts`, `embedding_score` (cosine similarity of the embeddings)
    and `joint_score` (weighted logit, late interaction and pooled similarity).

    \b
    Examples:
      edje-index search photos.edje "two dogs play in the snow"
      edje-index search photos.edje "a red car" -k 3 --pool 500 --json
      edje-index search photos.edje "a red car" --score logit
      edje-index search photos.edje "a red car" --score logit=1,embedding=20
      edje-index search photos.edje "a red car" --no-rerank
      edje-index search photos.edje "a red car" --html car.html --open
    """
    _check(k, pool, rerank=rerank, score=score, html=html, open_page=open_page)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # one query: threads that spin between products cost more
    from storage_formats.format.manifest import Manifest

    trained = Manifest.load(index).model.get("trained", True)  # may raise, so it comes before torch is loaded
    from edje_index.search.token_index import TokenIndex

    started = time.perf_counter()
    opened = TokenIndex.open(index, model, device=device, dtype=dtype, score=score)
    loaded = time.perf_counter()
    if not trained:
        note("note: this model is untrained: the order of these hits has no meaning")
    pool = max(pool, k)
    candidates = opened.search(text, pool if html else k, pool, rerank=rerank)
    hits = candidates[:k]
    timings = {"load index and model": loaded - started, "search": time.perf_counter() - loaded}
    if html is not None:
        _write_page(html, opened, candidates, k=k, query=text, score=score, timings=timings)
        note(f"page: {html}")
        if open_page:
            click.launch(str(html.resolve()))
    if as_json:
        print_json({"query": text, "hits": [asdict(hit) for hit in hits]})
    else:
        _print(hits)
        if rerank:
            note(_explanation(opened.model.weights("t2i", score)))


def _check(k: int, pool: int, *, rerank: bool, score: str, html: Path | None, open_page: bool) -> None:
    """Refuse options that contradict each other."""
    if rerank and pool < k:
        raise UsageError(f"--pool {pool} is smaller than -k {k}: only candidates in the pool can become hits")
    if not rerank and score != BUNDLE_SCORE:
        raise UsageError("--score has no effect with --no-rerank: leave one of them out")
    if html is not None and not rerank:
        raise UsageError("--html compares the orders before and after re-ranking: leave out --no-rerank")
    if open_page and html is None:
        raise UsageError("--open needs the file to write: add --html FILE")


def _write_page(
    path: Path, opened: TokenIndex, candidates: list[Hit], *, k: int, query: str, score: str, timings: dict[str, float]
) -> None:
    from pipelines.pages.search_page import SearchContext, search_page
    from storage_formats.atomic import write_bytes_atomic

    context = SearchContext(
        root=opened.root,
        query=query,
        precision=opened.precision,
        weights=opened.model.weights("t2i", score),
        trained=opened.model.trained,
        timings=timings,
    )
    write_bytes_atomic(path, search_page(candidates, k, context).encode())


def _explanation(weights: ScoreWeights) -> str:
    return (
        f"score = {weights.described()}; it orders the hits of one query and cannot be compared between queries. "
        "joint: its share from logit, late interaction and pooled similarity. embedding: cosine similarity of the "
        "embeddings."
    )


def _print(hits: list[Hit]) -> None:
    print_line(f"{'score':>9} {'joint':>9} {'embedding':>10} {'row':>9}  image")
    for hit in hits:
        joint = "-" if hit.joint_score is None else f"{hit.joint_score:.4f}"
        print_line(f"{hit.score:>9.4f} {joint:>9} {hit.embedding_score:>10.4f} {hit.row_id:>9}  {hit.uri}")
