"""The command `edje-index explain`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click

from pipelines.cli.options import (
    FILE,
    PATH,
    json_option,
    model_option,
    read_precision_option,
)
from pipelines.cli.output import note, print_json, print_line, run_steps
from storage_formats.errors import UsageError

_FREQUENT = 10


@click.command()
@click.argument("index", type=PATH)
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
    metavar="INDEX[=MODEL]",
    help=(
        "Another index of the same images, and optionally its model bundle. A paired"
        " t-test compares the alignments."
    ),
)
@json_option
def explain(
    index: Path,
    rows: tuple[int, ...],
    out: Path,
    model: Path | None,
    precision: str | None,
    captions: Path | None,
    images: Path | None,
    split: str | None,
    against: str | None,
    as_json: bool,
) -> None:
    """Write an HTML page that explains the tokens of INDEX with words.

    ROW is a row id. For each ROW, the page shows the image and the words of the
    language model that are nearest to the tokens. If the model has a compressed
    adapter, the page also shows the attention of the adapter's queries, which is the
    part of the image that each token was computed from. Without ROW, the page shows the
    first images of a random sample. The page also shows the most frequent words in the
    sample. With --captions, the page also shows how well the words of captions align
    with tokens.

    \b
    Examples:
      edje-index explain photos.edje
      edje-index explain photos.edje 17 230 --precision nvfp4 --out words.html
      edje-index explain local.edje --captions dataset_flickr30k.json \\
        --split test --against m64.edje
    """
    if captions is None and (images or split or against):
        raise UsageError(
            "--images, --split and --against need --captions; add --captions FILE"
        )
    from edje_index.evaluation.explain import explain_index
    from pipelines.pages import explain_page
    from storage_formats.atomic import write_bytes_atomic

    other = None
    other_model = None
    if against is not None:
        path, equals, bundle = against.rpartition("=")
        if not equals or Path(against).exists():
            other = Path(against)
        elif path and bundle:
            other = Path(path)
            other_model = Path(bundle)
        else:
            raise UsageError(f"give INDEX or INDEX=MODEL, got '{against}'")
    explanation = run_steps(
        explain_index,
        index,
        rows,
        model=model,
        precision=precision,
        captions=captions,
        images=images,
        split=split,
        against=other,
        against_model=other_model,
        stopped="stopped before the page was written",
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
            }
            for row in explanation.rows
        ]
        value = {
            **asdict(replace(explanation, rows=())),
            "root": str(explanation.root),
            "rows": explained,
        }
        print_json({**value, "against": against, "page": str(out)})
        return
    words = explanation.words
    alignment = explanation.alignment
    frequent = ", ".join(f"{word} {count:,}" for word, count in words.words[:_FREQUENT])
    print_line(f"{explanation.sample:,} images, {words.tokens:,} tokens: {frequent}")
    print_line(
        f"special tokens {words.special / words.tokens:.1%}, unused tokens"
        f" {words.unused / words.tokens:.1%}"
    )
    if alignment is None:
        return
    scores_of = {explanation.root: alignment.first}
    if explanation.against is not None and alignment.second is not None:
        scores_of[explanation.against] = alignment.second
    for name, scores in scores_of.items():
        print_line(
            f"alignment S of {name}: {scores.mean:.4f} +- {scores.deviation:.4f},"
            f" {scores.pairs:,} pairs"
        )
    if alignment.test is not None:
        test = alignment.test
        print_line(
            f"paired t-test: t {test.t:.2f}, p {test.p:.1e}, effect size"
            f" {test.effect_size:.2f}"
        )
