"""The commands `edje-index search`, `explain` and `eval`."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edje_index.scoring.weights import BUNDLE_SCORE, PART_NAMES, WEAK_RELEVANCE
from pipelines.cli.options import (
    FILE,
    PATH,
    POSITIVE,
    command,
    device_option,
    dtype_option,
    images_option,
    index_argument,
    json_option,
    local_index_argument,
    model_option,
    option,
    precision_name,
    quiet_option,
    read_precision_option,
    score_option,
    where_option,
)
from pipelines.cli.output import (
    note,
    print_json,
    print_line,
    print_result,
    run_steps,
    wants_json,
)
from pipelines.collector import paused_collector
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.search.hits import Hits


# Number of queries that are searched in one call. Their hits are printed when the call
# returns.
_QUERIES_AT_ONCE = 64
# number of frequent words that `explain` prints
_FREQUENT = 10


@command()
@index_argument
@click.argument("text", required=False)
@option("--queries", FILE)
@option("--image", FILE)
@option("--texts", FILE)
@option(
    "-k",
    POSITIVE,
    default=10,
)
@option("--pool", POSITIVE)
@score_option
@where_option
@read_precision_option
@option(
    "--min-relevance",
    click.FloatRange(0, 1),
    default=0.0,
)
@option("--columns", metavar="NAMES")
@model_option
@device_option
@dtype_option
@option("--html", FILE)
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
    **options: Any,
) -> None:
    """Find the images that match TEXT best. Give TEXT, --queries or --image.

    The candidates are the rows whose embeddings are nearest to the embedding of TEXT.
    The candidates are then sorted by the final score, a weighted sum of several scores.
    The weights are in the model bundle; --score sets other weights. With --score
    embedding, the candidates are not re-ranked.

    Hits have a relevance between 0 and 1, which says how strongly the score speaks for
    a match. Hits with a relevance below 0.5 are weak: a text that matches no image gets
    hits with such scores, too.

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

    Options:
        --queries: File of queries: one query per line, or a .jsonl file of texts or of
            objects with the key `query`.
        --image: Image file to search with. Hits are sorted by embedding similarity,
            without re-ranking.
        --texts: File with one text per line. With --image, find the texts that describe
            the image best.
        -k: Number of hits.
        --pool: Number of candidates to re-rank.  [default: that of the model bundle,
            usually 100]
        --min-relevance: Leave out hits with a lower relevance.
        --columns: Columns that each hit shows, separated by commas: --columns
            captions,width.  [default: the captions]
        --html: Also write an HTML page that shows the hits before and after re-ranking.
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
        "--columns": columns is not None and texts is not None,
        "--pool": pool is not None and image is not None and texts is None,
    }
    given = {"--texts": texts, "--image": image, "--queries": queries}
    for flag in filter(useless.get, useless):
        other = next(name for name, value in given.items() if value is not None)
        raise UsageError(f"{flag} has no effect with {other}: leave out {flag}")
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
    # By default, OpenMP threads spin between two matrix products. For a single query,
    # spinning costs more time than it saves.
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
        text_hits = [
            hit
            for hit in opened.search_texts(image, choices, k, pool, score=score)
            if hit.relevance >= min_relevance
        ]
        if wants_json():
            print_json(
                {"query": str(image), "hits": [asdict(hit) for hit in text_hits]}
            )
            return
        print_line("relevance  text")
        for text_hit in text_hits:
            print_line(f"{text_hit.relevance:>9.3f}  {text_hit.text}")
        return
    if image is not None:
        hits = opened.search_image(image, k, where=where)
        _print_hits(str(image), hits.at_least(min_relevance), empty)
        return
    # The page ranks all candidates, so the search has to return all of them.
    shown = k if html is None else pool or max(k, opened.default_pool)
    for start in range(0, len(query_texts), _QUERIES_AT_ONCE):
        batch = query_texts[start : start + _QUERIES_AT_ONCE]
        results = opened.search(batch, shown, pool, where=where)
        for query, hits in zip(batch, results, strict=True):
            if queries is not None and not wants_json():
                print_line(f"query: {query}")
            kept = hits.at_least(min_relevance).first(k)
            marks_weak = opened.model.info.trained
            _print_hits(query, kept, empty, marks_weak=marks_weak)
    if html is not None:
        from pipelines.pages import search_page
        from storage_formats.atomic import write_bytes_atomic

        page = search_page(
            opened,
            query_texts[0],
            results[0],
            k,
            score,
            min_relevance,
            is_filtered=where is not None,
        )
        write_bytes_atomic(html, page.encode(errors="backslashreplace"))
        note(f"page: {html}")


def _print_hits(
    query: str,
    hits: Hits,
    empty: str,
    *,
    marks_weak: bool = False,
) -> None:
    """Print the hits of a query, or the message `empty` if there are none."""
    if wants_json():
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
            # The separator goes to standard error, because programs that read standard
            # output expect one line per hit.
            note("--------- weak matches from here")
            marks_weak = False
        numbers = f"{hit.relevance:>9.3f} {hit.row_id:>9}"
        print_line("  ".join(filter(None, [numbers, hit.uri, hit.described()])))


@command()
@local_index_argument
@click.argument("rows", metavar="[ROW]...", nargs=-1, type=click.IntRange(min=0))
@option(
    "--out",
    FILE,
    default="explain.html",
)
@model_option
@read_precision_option
@option("--query", metavar="TEXT")
@option(
    "--captions",
    PATH,
    metavar="FILE",
)
@option("--images", PATH)
@option("--split", metavar="NAME")
@option(
    "--against",
    PATH,
    metavar="INDEX",
)
@json_option
def explain(
    index: Path,
    rows: tuple[int, ...],
    out: Path,
    **options: Any,
) -> None:
    """Write an HTML page that explains the tokens of INDEX with words.

    ROW is a row id. For each ROW, the page shows the image and the words of the
    language model that are nearest to the tokens. If the model has a compressed
    adapter, the page also shows the attention of the adapter's queries, which is the
    part of the image that each token was computed from. The page also shows the most
    frequent words of a random sample of images. Without ROW, the page shows the first
    images of this sample.

    With --query, the page shows which words of the query found which patches of the
    image, and the value, the weight and the product of each part of the score. With
    --captions, the page also shows how well the words of captions align with tokens.

    \b
    Examples:
      edje-index explain photos.edje
      edje-index explain photos.edje 17 --query "a red canoe"
      edje-index explain photos.edje 17 230 --precision nvfp4 --out words.html
      edje-index explain local.edje --captions dataset_flickr30k.json \\
        --split test --against m64.edje

    Options:
        --out: HTML file to write.
        --query: Explain why TEXT finds ROW.  [default ROW: the first hit]
        --captions: File of captions, to measure how well the words of captions align
            with tokens.
        --images: Base directory of the relative image paths in --captions.  [default:
            directory of --captions]
        --split: Use only this split of --captions.  [default: all splits]
        --against: Another index of the same images. A paired t-test compares the
            alignment of both indexes.
    """
    given = [options[name] for name in ("images", "split", "against")]
    if options["captions"] is None and any(given):
        raise UsageError(
            "--images, --split and --against need --captions; add --captions FILE"
        )
    from edje_index.evaluation.explain import explain_index, is_whole_word
    from pipelines.pages import explain_page
    from storage_formats.atomic import write_bytes_atomic

    explanation = run_steps(
        explain_index,
        index,
        rows,
        stopped="stopped before the page was written",
        **options,
    )
    page = explain_page(explanation)
    write_bytes_atomic(out, page.encode(errors="backslashreplace"))
    note(f"page: {out}")
    if wants_json():
        # The JSON object leaves out the arrays, such as attention maps. The page shows
        # them.
        of_match = ("query", "relevance", "score", "parts")
        explained = [
            {
                "row_id": row.row_id,
                "uri": row.uri,
                "words": asdict(row.words),
                "token_words": row.token_words,
                "attention": row.no_attention,
                "match": row.match
                and {name: getattr(row.match, name) for name in of_match},
            }
            for row in explanation.rows
        ]
        value = asdict(replace(explanation, rows=()))
        print_json({**value, "rows": explained, "page": out})
        return
    for row in explanation.rows:
        if row.match is not None:
            print_line(f"row {row.row_id}: {row.uri}")
            print_line(f"{'part':<22}{'value':>10}{'weight':>10}{'product':>10}")
            for part, (number, weight) in row.match.parts.items():
                numbers = f"{number:>10.4f}{weight:>10.4g}{number * weight:>10.2f}"
                print_line(f"{PART_NAMES[part]:<22}{numbers}")
            print_line(f"{'score':<42}{row.match.score:>10.2f}")
    words = explanation.words
    whole = [(word, count) for word, count in words.words if is_whole_word(word)]
    frequent = ", ".join(f"{word} {count:,}" for word, count in whole[:_FREQUENT])
    print_line(f"{explanation.sample:,} images, {words.tokens:,} tokens: {frequent}")


@command("eval")
@local_index_argument
@click.argument("captions", type=PATH, required=False)
@images_option
@option("--split", metavar="NAME")
@model_option
@option(
    "--precision",
    precision_name,
    key="precisions",
    multiple=True,
    metavar="NAME",
)
@option(
    "--pool",
    POSITIVE,
    key="pools",
    multiple=True,
)
@option("--full", bool)
@score_option
@option(
    "--queries",
    POSITIVE,
    metavar="N",
)
@option("--report", PATH)
@device_option
@dtype_option
@quiet_option
@json_option
def evaluate(
    index: Path,
    captions: Path | None,
    report: Path | None,
    **settings: Any,
) -> None:
    """Measure the recall of INDEX on captioned images, before and after re-ranking.

    CAPTIONS is a file of captions in JSONL, JSON (Karpathy or COCO), CSV, TSV, Parquet
    or WebDataset tar format. Without CAPTIONS, the captions are those that INDEX holds.
    In text-to-image search, the correct hit is the image of the caption. In
    image-to-text search, every caption of the image is a correct hit.

    The candidates are the images and captions of CAPTIONS, or of one split of CAPTIONS
    with --split. With --full, all images of INDEX and all captions of CAPTIONS are
    candidates.

    \b
    Examples:
      edje-index eval photos.edje
      edje-index eval photos.edje captions.jsonl --split dev \\
        --precision bf16 --precision fp8 --report out
      edje-index eval photos.edje dataset_flickr30k.json \\
        --images flickr30k-images --split test --pool 10
      edje-index eval photos.edje captions.jsonl --score logit
      edje-index eval photos.edje captions.jsonl --score embedding
      edje-index eval photos.edje captions.jsonl --queries 500
      edje-index eval photos.edje dataset_coco.json --split test --full

    Options:
        --split: Use only this split of CAPTIONS. With --full, the split limits only the
            queries.  [default: all splits]
        --precision: Token precision to evaluate; repeatable. Tokens are converted in
            memory to a precision that INDEX does not store.  [default: all precisions
            stored in INDEX]
        --pool: Number of candidates to re-rank; repeatable.  [default: 10, 20 and 50;
            with --full 100]
        --full: Use all images of INDEX and all captions of CAPTIONS as candidates, and
            report recall at 5, 10 and 20.
        --queries: Sample N queries per direction.  [default: all queries]
        --report: Directory for report.md and report.json.
    """
    from edje_index.evaluation.evaluate import evaluate as measure
    from edje_index.evaluation.report import (
        check_report_folder,
        evaluation_report,
        write_report,
    )

    if report is not None:
        check_report_folder(report)
    stopped = "stopped before the evaluation was done"
    result = run_steps(measure, index, captions, stopped=stopped, **settings)
    if not result.system.trained:
        note("note: the model is untrained, so the order of its hits is random")
    text = evaluation_report(result)
    print_result(result.to_json(), *text.splitlines())
    if report is not None:
        write_report(report, text, result.to_json())
        note(f"report written to {report}")
