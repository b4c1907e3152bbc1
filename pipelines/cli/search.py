"""The commands `edje-index search`, `explain` and `eval`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edje_index.scoring.weights import BUNDLE_SCORE, PART_NAMES, WEAK_RELEVANCE
from pipelines.cli.command import Job, command
from pipelines.cli.output import (
    note,
    print_json,
    print_line,
    wants_json,
    write_output,
)
from pipelines.collector import paused_collector
from pipelines.progress.events import JobStopped
from storage_formats.arguments import as_number
from storage_formats.errors import UsageError
from storage_formats.remote.urls import IndexLocation

if TYPE_CHECKING:
    from edje_index.search.hits import Hits, TextHit


# Number of queries that are searched in one call. Their hits are printed when the call
# returns.
_QUERIES_AT_ONCE = 64
# number of frequent words that `explain` prints
_FREQUENT = 10
# Options of `search` without effect on each kind of query.
_WITHOUT_EFFECT = {
    "--texts": "where precision html columns csv",
    "--image": "score precision html pool",
    "--queries": "html",
}


@command()
def search(
    index: IndexLocation,
    text: str | None = None,
    *,
    queries: Path | None = None,
    image: Path | None = None,
    texts: Path | None = None,
    k: int = 10,
    pool: int | None = None,
    score: str = BUNDLE_SCORE,
    where: str | None = None,
    precision: str | None = None,
    min_relevance: float = 0.0,
    columns: str | None = None,
    model: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    html: Path | None = None,
    csv: Path | None = None,
) -> None:
    """Find the images that match TEXT best. Give TEXT, --queries or --image.

    The candidates are the rows whose embeddings are nearest to the embedding of TEXT.
    The candidates are then sorted by the final score, a weighted sum of several scores.
    The weights are in the model bundle; --score sets other weights. With --score
    embedding, the candidates are not re-ranked.

    Hits have a relevance between 0 and 1, which says how strongly the score speaks for
    a match. Hits with a relevance below 0.5 are weak: a text that matches no image gets
    hits with such scores, too.

    'edje-index info' shows the formula of the score. With --json, each hit also
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
      edje-index search photos.edje "a red car" --csv car.csv
      edje-index search photos.edje --queries queries.txt --json
      edje-index search photos.edje --image car.jpg
      edje-index search photos.edje --image car.jpg --texts captions.txt

    Args:
        queries: file of queries: one query per line, or a .jsonl file of texts or of
            objects with the key "query".
        image: image file to search with. Hits are sorted by embedding similarity,
            without re-ranking, and have no relevance.
        texts: file with one text per line. With `image`, find the texts that describe
            the image best.
        k: number of hits.
        pool: number of candidates to re-rank. None selects that of the model
            bundle, usually 100.
        score: final score that sorts the hits: "bundle" (weighted sum with the weights
            of the model bundle), or PART=WEIGHT,... (your own weights). A PART without
            WEIGHT has weight 1. The parts are logit (joint encoder), embedding,
            late_interaction and pooled. None selects bundle.
        where: select rows by a filter, for example "width > 800 and licence = 'cc0'".
            'info' lists the columns.
        precision: precision of the tokens to read. None selects the highest fidelity
            stored.
        min_relevance: leave out hits with a lower relevance, from 0 to 1.
        columns: columns that each hit shows, separated by commas: captions,width. None
            selects the captions.
        model: directory of the model bundle. None selects the bundle that built INDEX.
        device: device that runs the model. auto uses cuda if a CUDA device is
            available.
        dtype: data type of the joint encoder's matrix products. bfloat16 is faster than
            float32 only on processors with bfloat16 instructions. auto is bfloat16 on
            these and on cuda if the model bundle says that recall stays the same, else
            float32.
        html: also write an HTML page that shows the hits before and after re-ranking.
        csv: also write the hits to a table for spreadsheets: CSV, or Parquet if the
            name ends in .parquet.
    """
    as_number(min_relevance, "min_relevance", most=1.0)
    if csv and csv.suffix.lower() not in ("", ".csv", ".parquet"):
        raise UsageError(
            f"--csv writes no {csv.suffix}: give a name that ends in .csv or .parquet"
        )
    if csv and csv.is_dir():
        raise UsageError(f"--csv: {csv} is a directory: give the name of a file")
    sources = {"--texts": texts, "--image": image, "--queries": queries}
    if sum(query is not None for query in (text, queries, image)) != 1:
        raise UsageError("give one of TEXT, --queries FILE and --image FILE")
    if texts is not None and image is None:
        raise UsageError("--texts are ranked for an image: add --image FILE")
    if image is not None and texts is None and min_relevance:
        raise UsageError(
            "similar images have no relevance: leave out --min-relevance, or add"
            " --texts FILE"
        )
    source = next((flag for flag, value in sources.items() if value is not None), "")
    given = click.get_current_context().params
    for name in _WITHOUT_EFFECT.get(source, "").split():
        if given[name] is not None:
            raise UsageError(
                f"--{name} has no effect with {source}: leave out --{name}"
            )

    from edje_index.inputs.names import has_input_suffix
    from edje_index.search.query import read_queries

    query_texts = [] if text is None else [text]
    if queries is not None:
        query_texts = read_queries(queries)
    choices = [] if texts is None else read_queries(texts)
    if image is not None and not image.exists():
        raise UsageError(f"{image} does not exist; check the path", parameter="image")
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
            index,
            model,
            precision=precision,
            score=score,
            columns=names,
            device=device,
            dtype=dtype,
        )
    trained = opened.model.info.trained
    if not trained:
        note("note: this model is untrained: the order of these hits has no meaning")
    empty = "no hits: the index has no photos"
    if where is not None:
        empty = "no photo passes the filter"
    if min_relevance:
        empty = f"no hit has a relevance of {min_relevance:g}: lower --min-relevance"
    # The page ranks all candidates, so the search has to return all of them.
    shown = k if html is None else pool or max(k, opened.default_pool)

    def answers() -> Iterator[tuple[str, Any]]:
        if image is not None and choices:
            yield str(image), opened.search_texts(image, choices, k, pool, score=score)
        elif image is not None:
            yield str(image), opened.search_image(image, k, where=where)
        for start in range(0, len(query_texts), _QUERIES_AT_ONCE):
            batch = query_texts[start : start + _QUERIES_AT_ONCE]
            yield from zip(
                batch, opened.search(batch, shown, pool, where=where), strict=True
            )

    printed: list[tuple[str, Any]] = []
    for query, found in answers():
        if queries is not None and not wants_json():
            print_line(f"query: {query}")
        if choices:
            kept = [hit for hit in found if hit.relevance >= min_relevance]
        else:
            kept = found.at_least(min_relevance).first(k)
        _print_hits(query, kept, empty, marks_weak=trained and image is None)
        if csv is not None:
            printed.append((query, kept))
    if csv is not None:
        _write_table(csv, printed)
    if html is not None:
        from pipelines.pages import search_page

        page = search_page(
            opened,
            query,
            found,
            k,
            score,
            min_relevance,
            is_filtered=where is not None,
        )
        write_output(html, page.encode(errors="backslashreplace"))
        note(f"page: {html}")


def _write_table(path: Path, answers: Sequence[tuple[str, Hits]]) -> None:
    """Write the hits of all queries to one table, with the query of each hit in the
    first column.
    """
    import pyarrow as pa

    from edje_index.search.hits import table_bytes
    from storage_formats.format.source_columns import stored_name

    tables = []
    for query, hits in answers:
        table = hits.to_arrow()
        names = [stored_name(name, ["query"]) for name in table.column_names]
        table = table.rename_columns(names)
        queries = pa.array([query] * len(table), pa.string())
        tables.append(table.add_column(0, "query", queries))
    joined = pa.concat_tables(tables, promote_options="permissive")
    write_output(path, table_bytes(joined, path.suffix))
    note(f"table: {path}")


def _print_hits(
    query: str,
    hits: Hits | list[TextHit],
    empty: str,
    *,
    marks_weak: bool,
) -> None:
    """Print the hits of a query, or the message `empty` if there are none."""
    from edje_index.search.hits import Hits, TextHit

    if wants_json():
        answer: dict[str, Any] = {"query": query, "hits": [*map(asdict, hits)]}
        if isinstance(hits, Hits):
            answer["stages_ms"] = {
                stage: round(1000 * seconds, 3)
                for stage, seconds in hits.stages.items()
            }
        print_json(answer)
        return
    if not hits:
        note(empty)
        return
    named = f"{'row':>9}  image" if isinstance(hits, Hits) else " text"
    # Similar images have no relevance.
    measure = "cosine" if hits[0].relevance is None else "relevance"
    print_line(f"{measure:>9} {named}")
    for hit in hits:
        value = hit.embedding_score if hit.relevance is None else hit.relevance
        if marks_weak and value < WEAK_RELEVANCE:
            # The separator goes to standard error, because programs that read standard
            # output expect one line per hit.
            note("--------- weak matches from here")
            marks_weak = False
        if isinstance(hit, TextHit):
            line = hit.text
        else:
            line = f"{hit.row_id:>8}  {hit.uri}"
            if description := hit.described():
                line += f"  {description}"
        print_line(f"{value:>9.3f}  {line}")


@command("edje_index.evaluation.explain:explain_index")
def explain(job: Job, *, out: Path = Path("explain.html")) -> Iterator[str]:
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

    Args:
        out: HTML file to write. None selects explain.html.
    """
    from edje_index.evaluation.explain import is_whole_word
    from pipelines.pages import explain_page

    explanation = job.run()
    page = explain_page(explanation)
    write_output(out, page.encode(errors="backslashreplace"))
    note(f"page: {out}")
    job.result = {**asdict(explanation), "page": out}
    for row in explanation.rows:
        if row.match is not None:
            yield f"row {row.row_id}: {row.uri}"
            yield f"{'part':<22}{'value':>10}{'weight':>10}{'product':>10}"
            for part, (number, weight) in row.match.parts.items():
                numbers = f"{number:>10.4f}{weight:>10.4g}{number * weight:>10.2f}"
                yield f"{PART_NAMES[part]:<22}{numbers}"
            yield f"{'score':<42}{row.match.score:>10.2f}"
    words = explanation.words
    whole = [(word, count) for word, count in words.words if is_whole_word(word)]
    frequent = ", ".join(f"{word} {count:,}" for word, count in whole[:_FREQUENT])
    yield f"{explanation.sample:,} images, {words.tokens:,} tokens: {frequent}"


@command(
    "edje_index.evaluation.evaluate:evaluate",
    name="eval",
    precisions="--precision",
    pools="--pool",
    resamples=None,
    seed=None,
    dtype=None,
)
def evaluate(job: Job, *, report: Path | None = None) -> Iterator[str]:
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

    Args:
        report: directory for report.md and report.json.
    """
    from edje_index.evaluation.report import (
        check_report_folder,
        evaluation_report,
        write_report,
    )

    if report is not None:
        check_report_folder(report)
    try:
        result = job.run(dtype="auto")
    except JobStopped as error:
        error.args = (
            f"{error}; the same command continues. A smaller --queries, a smaller"
            " --pool or fewer --precision take less time",
        )
        raise
    job.result = result.to_json()
    if not result.trained:
        note("note: the model is untrained, so the order of its hits is random")
    text = evaluation_report(result)
    if report is not None:
        write_report(report, text, job.result)
        note(f"report written to {report}")
    yield from text.splitlines()
