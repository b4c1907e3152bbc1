"""The command `edje-index explain`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edje_index.scoring.weights import PART_NAMES
from pipelines.cli.options import (
    FILE,
    PATH,
    json_option,
    local_index_argument,
    model_option,
    read_precision_option,
)
from pipelines.cli.output import note, print_json, print_line, run_steps
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.evaluation.explain import QueryMatch

_FREQUENT = 10


@click.command()
@local_index_argument
@click.argument("rows", metavar="[ROW]...", nargs=-1, type=click.IntRange(min=0))
@click.option(
    "--out",
    type=FILE,
    default="explain.html",
    help="HTML file to write.",
)
@model_option
@read_precision_option
@click.option(
    "--query",
    metavar="TEXT",
    help="Explain why TEXT finds ROW.  [default ROW: the first hit]",
)
@click.option(
    "--captions",
    type=PATH,
    metavar="FILE",
    help=(
        "File of captions, to measure how well the words of captions align with tokens."
    ),
)
@click.option(
    "--images",
    type=PATH,
    help=(
        "Base directory of the relative image paths in --captions.  [default: directory"
        " of --captions]"
    ),
)
@click.option(
    "--split",
    metavar="NAME",
    help="Use only this split of --captions.  [default: all splits]",
)
@click.option(
    "--against",
    type=PATH,
    metavar="INDEX",
    help=("Another index of the same images. A paired t-test compares the alignments."),
)
@json_option
def explain(
    index: Path, rows: tuple[int, ...], out: Path, as_json: bool, **options: Any
) -> None:
    """Write an HTML page that explains the tokens of INDEX with words.

    ROW is a row id. For each ROW, the page shows the image and the words of the
    language model that are nearest to the tokens. If the model has a compressed
    adapter, the page also shows the attention of the adapter's queries, which is the
    part of the image that each token was computed from. Without ROW, the page shows the
    first images of a random sample. The page also shows the most frequent words in the
    sample.

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
    # of the attention, only the reason why it is missing
    if as_json:
        explained = [
            {
                "row_id": row.row_id,
                "uri": row.uri,
                "words": asdict(row.words),
                "token_words": row.token_words,
                "attention": row.no_attention,
                "match": None if row.match is None else _without_arrays(row.match),
            }
            for row in explanation.rows
        ]
        value = {
            **asdict(replace(explanation, rows=())),
            "root": str(explanation.root),
            "rows": explained,
        }
        against = options["against"]
        print_json({**value, "against": against and str(against), "page": str(out)})
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


def _without_arrays(match: QueryMatch) -> dict[str, Any]:
    """Return a match as JSON values. Of the arrays, only the nearest similarity of each
    word is kept.
    """
    value = {**vars(match)}
    nearest = value.pop("similarities").max(axis=1, initial=-1.0).tolist()
    del value["drops"]
    return {**value, "words": dict(zip(match.words, nearest, strict=True))}
