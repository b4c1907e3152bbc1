"""The command `edje-index eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipelines.cli.options import (
    PATH,
    POSITIVE,
    device_option,
    dtype_option,
    images_option,
    json_option,
    local_index_argument,
    model_option,
    quiet_option,
    score_option,
)
from pipelines.cli.output import note, print_json, run_steps


@click.command("eval")
@local_index_argument
@click.argument("captions", type=PATH, required=False)
@images_option
@click.option(
    "--split",
    metavar="NAME",
    help=(
        "Use only this split of CAPTIONS. With --full, the split limits only the"
        " queries.  [default: all splits]"
    ),
)
@model_option
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    metavar="NAME",
    help=(
        "Token precision to evaluate; repeatable. Tokens are converted in memory to a"
        " precision that INDEX does not store.  [default: all precisions stored in"
        " INDEX]"
    ),
)
@click.option(
    "--pool",
    "pools",
    type=POSITIVE,
    multiple=True,
    help=(
        "Number of candidates to re-rank; repeatable.  [default: 10, 20 and 50; with"
        " --full 100]"
    ),
)
@click.option(
    "--full",
    is_flag=True,
    help=(
        "Use all images of INDEX and all captions of CAPTIONS as candidates, and report"
        " recall at 5, 10 and 20."
    ),
)
@score_option
@click.option(
    "--queries",
    type=POSITIVE,
    metavar="N",
    help="Sample N queries per direction.  [default: all queries]",
)
@click.option("--report", type=PATH, help="Directory for report.md and report.json.")
@device_option
@dtype_option
@quiet_option
@json_option
def evaluate(
    index: Path,
    captions: Path | None,
    report: Path | None,
    quiet: bool,
    as_json: bool,
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
    """
    from edje_index.evaluation.evaluate import evaluate as measure
    from edje_index.evaluation.report import evaluation_report, write_report

    stopped = "stopped before the evaluation was done"
    result = run_steps(
        measure, index, captions, quiet=quiet, stopped=stopped, **settings
    )
    if not result.system.trained:
        note("note: the model is untrained, so the order of its hits is random")
    text = evaluation_report(result)
    if as_json:
        print_json(result.to_json())
    else:
        click.echo(text, nl=False)
    if report is not None:
        write_report(report, text, result.to_json())
        note(f"report written to {report}")
