"""The command `edje-index search`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edje_index.scoring.weights import BUNDLE_SCORE, WEAK_RELEVANCE
from pipelines.cli.options import (
    FILE,
    POSITIVE,
    device_option,
    dtype_option,
    index_argument,
    json_option,
    model_option,
    read_precision_option,
    score_option,
    where_option,
)
from pipelines.cli.output import note, print_json, print_line
from pipelines.collector import paused_collector
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.search.hits import Hits

# their hits appear together
_QUERIES_AT_ONCE = 64


@click.command()
@index_argument
@click.argument("text", required=False)
@click.option(
    "--queries",
    type=FILE,
    help=(
        "File of queries: one query per line, or a .jsonl file of texts or of objects"
        " with the key `query`."
    ),
)
@click.option(
    "--image",
    type=FILE,
    help=(
        "Image file to search with. Hits are sorted by embedding similarity, without"
        " re-ranking."
    ),
)
@click.option(
    "--texts",
    type=FILE,
    help=(
        "File with one text per line. With --image, find the texts that describe the"
        " image best."
    ),
)
@click.option("-k", "k", type=POSITIVE, default=10, help="Number of hits.")
@click.option(
    "--pool",
    type=POSITIVE,
    help=(
        "Number of candidates to re-rank.  [default: that of the model bundle, usually"
        " 100]"
    ),
)
@score_option
@where_option
@read_precision_option
@click.option(
    "--min-relevance",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Leave out hits with a lower relevance.",
)
@click.option(
    "--columns",
    metavar="NAMES",
    help=(
        "Columns that each hit shows, separated by commas: --columns captions,width. "
        " [default: the captions]"
    ),
)
@model_option
@device_option
@dtype_option
@click.option(
    "--html",
    type=FILE,
    help="Also write an HTML page that shows the hits before and after re-ranking.",
)
@json_option
def search(
    index: Path | str,
    text: str | None,
    queries: Path | None,
    image: Path | None,
    texts: Path | None,
    k: int,
    pool: int | None,
    score: str,
    where: str | None,
    precision: str | None,
    min_relevance: float,
    columns: str | None,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the images that match TEXT best. Give TEXT, --queries or --image.

    The candidates are the rows whose embeddings are nearest to the embedding of TEXT.
    The candidates are then sorted by the final score, a weighted sum of several scores.
    The weights are in the model bundle; --score sets other weights. With --score
    embedding, the candidates are not re-ranked.

    Hits have a relevance between 0 and 1, which says how strongly the score speaks for
    a match. Below 0.5, hits are weak: images score as high for texts that no image
    matches.

    'edje-index model show' shows the formula of the score. With --json, each hit also
    has the final score and its parts before weighting.
    `embedding_score` is the cosine similarity of the embeddings. `joint_score` is the
    weighted sum of logit, late interaction and pooled similarity. With --queries,
    --json prints one line per query.

    With --image and --texts, the hits are texts, sorted by the final score for
    image-to-text search.

    \b
    Examples:
      edje-index search photos.edje "two dogs play in the snow"
      edje-index search photos.edje "a red car" -k 3 --pool 500 --json
      edje-index search photos.edje "a red car" --min-relevance 0.5
      edje-index search photos.edje "a red car" --score logit=1,embedding=20
      edje-index search photos.edje "a car" --where "width > 800 and licence = 'cc0'"
      edje-index search photos.edje "a red car" --columns captions,licence
      edje-index search photos.edje "a red car" --html car.html
      edje-index search photos.edje --queries queries.txt --json
      edje-index search photos.edje --image car.jpg
      edje-index search photos.edje --image car.jpg --texts captions.txt
    """
    if sum(query is not None for query in (text, queries, image)) != 1:
        raise UsageError("give one of TEXT, --queries FILE and --image FILE")
    if texts is not None and image is None:
        raise UsageError("--texts are ranked for an image: add --image FILE")
    useless = {
        "--score": score != BUNDLE_SCORE and image is not None and texts is None,
        "--precision": precision is not None and image is not None,
        "--where": where is not None and texts is not None,
        "--html": html is not None and text is None,
    }
    given = {"--texts": texts, "--image": image, "--queries": queries}
    for option in filter(useless.get, useless):
        other = next(name for name, value in given.items() if value is not None)
        raise UsageError(f"{option} has no effect with {other}: leave out {option}")
    if pool is not None and pool < k:
        raise UsageError(
            f"--pool {pool} is smaller than -k {k}: only candidates can become hits, so"
            " raise --pool"
        )

    from edje_index.inputs.names import has_input_suffix
    from edje_index.search.query import read_queries

    query_texts = [] if text is None else [text]
    if queries is not None:
        query_texts = read_queries(queries)
    choices = [] if texts is None else read_queries(texts)
    if (
        text is not None
        and has_input_suffix(os.fsencode(text), clips=False)
        and os.path.isfile(text)
    ):
        note(
            f"note: {text} is searched as a text, but is an image file: did you mean"
            f" --image {text}?"
        )
    # for one query, threads that spin between products cost more
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    names = None if columns is None else [name.strip() for name in columns.split(",")]
    with paused_collector():
        from edje_index.search.token_index import TokenIndex

        opened = TokenIndex.open(
            index, precision=precision, score=score, columns=names, **options
        )
    if not opened.model.info.trained:
        note("note: this model is untrained: the order of these hits has no meaning")
    empty = "no hits: the index has no photos"
    if where is not None:
        empty = "no photo passes the filter"
    if min_relevance:
        empty = f"no hit has a relevance of {min_relevance:g}: lower --min-relevance"
    if image is not None and choices:
        found = opened.search_texts(image, choices, k, pool, score=score)
        if as_json:
            print_json({"query": str(image), "hits": [asdict(hit) for hit in found]})
            return
        print_line("relevance  text")
        for text_hit in found:
            print_line(f"{text_hit.relevance:>9.3f}  {text_hit.text}")
        return
    if image is not None:
        hits = opened.search_image(image, k, where=where)
        _print_hits(str(image), hits.at_least(min_relevance), empty, as_json)
        return
    shown = k if html is None else pool or max(k, opened.default_pool)
    for start in range(0, len(query_texts), _QUERIES_AT_ONCE):
        batch = query_texts[start : start + _QUERIES_AT_ONCE]
        results = opened.search(batch, shown, pool, where=where)
        for query, hits in zip(batch, results, strict=True):
            if queries is not None and not as_json:
                print_line(f"query: {query}")
            kept = hits.at_least(min_relevance).first(k)
            marks_weak = opened.model.info.trained
            _print_hits(query, kept, empty, as_json, marks_weak=marks_weak)
    if html is not None:
        from pipelines.pages import search_page
        from storage_formats.atomic import write_bytes_atomic

        page = search_page(
            opened,
            query_texts[0],
            results[0].at_least(min_relevance),
            k,
            score,
            is_filtered=where is not None,
        )
        write_bytes_atomic(html, page.encode(errors="backslashreplace"))
        note(f"page: {html}")


def _print_hits(
    query: str, hits: Hits, empty: str, as_json: bool, *, marks_weak: bool = False
) -> None:
    """Print the hits of a query, or the message `empty` if there are none."""
    if as_json:
        stages = {
            stage: round(1000 * seconds, 3) for stage, seconds in hits.stages.items()
        }
        listed = [asdict(hit) for hit in hits]
        print_json({"query": query, "hits": listed, "stages_ms": stages})
        return
    if not hits:
        note(empty)
        return
    print_line(f"relevance {'row':>9}  image")
    for hit in hits:
        if marks_weak and hit.relevance is not None and hit.relevance < WEAK_RELEVANCE:
            # standard output has one line per hit, for other programs
            note("--------- weak matches from here")
            marks_weak = False
        numbers = f"{hit.relevance:>9.3f} {hit.row_id:>9}"
        print_line("  ".join(filter(None, [numbers, hit.uri, hit.described()])))
