"""The command `edje-index eval`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from edje_index.scoring.weights import DIRECTIONS
from pipelines.cli.options import (
    PATH,
    POSITIVE,
    device_option,
    dtype_option,
    images_option,
    joint_pool_option,
    json_option,
    model_option,
    quiet_option,
    score_option,
    seed_option,
)
from pipelines.cli.output import note, print_json, this_command
from storage_formats.errors import UsageError


@click.command("eval")
@click.argument("index", type=PATH)
@click.argument("captions", type=PATH)
@images_option
@click.option(
    "--split",
    metavar="NAME",
    help="Use only this split of CAPTIONS. With --full, the split limits only the queries.  [default: all splits]",
)
@model_option
@click.option(
    "--also",
    multiple=True,
    metavar="INDEX[=MODEL]",
    help="Another index to evaluate, and optionally its model bundle; repeatable.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    metavar="NAME",
    help="Token precision to evaluate; repeatable. Tokens are converted in memory to a precision that INDEX does not "
    "store.  [default: all precisions stored in INDEX]",
)
@click.option(
    "--pool",
    "pools",
    type=POSITIVE,
    multiple=True,
    help="Number of candidates to re-rank; repeatable.  [default: 10, 20 and 50; with --full 100]",
)
@click.option(
    "--direction",
    type=click.Choice(["both", "t2i", "i2t"]),
    default="both",
    show_default=True,
    help="Search direction: text-to-image (t2i), image-to-text (i2t) or both.",
)
@click.option(
    "--full",
    is_flag=True,
    help="Use all images of INDEX and all captions of CAPTIONS as candidates, and report recall at 5, 10 and 20.",
)
@joint_pool_option
@score_option
@click.option("--rerank/--no-rerank", default=True, help="Evaluate with re-ranking, or evaluate the embeddings alone.")
@click.option("--queries", type=POSITIVE, metavar="N", help="Sample N queries per direction.  [default: all queries]")
@click.option(
    "--bootstrap",
    "resamples",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    help="Number of bootstrap resamples for confidence intervals; 0 computes no intervals.",
)
@seed_option
@click.option("--cache", type=PATH, help="Directory for computed scores. A later evaluation reuses these scores.")
@click.option("--report", type=PATH, help="Directory for report.md, report.json and plots.")
@device_option
@dtype_option
@quiet_option
@json_option
def evaluate(
    index: Path,
    model: Path | None,
    also: tuple[str, ...],
    direction: str,
    report: Path | None,
    quiet: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure the recall of INDEX on captioned images, before and after re-ranking.

    CAPTIONS is a file of captions in JSONL, JSON (Karpathy or COCO), Parquet or WebDataset tar format. In text-to-image
    search, the correct hit is the image of the caption. In image-to-text search, every caption of the image is a
    correct hit.

    The candidates are the images and captions of CAPTIONS, or of one split of CAPTIONS with --split. With --full, all
    images of INDEX and all captions of CAPTIONS are candidates.

    \b
    Examples:
      edje-index eval photos.edje captions.jsonl --split dev --precision bf16 --precision fp8 --report out
      edje-index eval photos.edje dataset_flickr30k.json --images flickr30k-images --split test --pool 10
      edje-index eval photos.edje captions.jsonl --score logit --cache scores
      edje-index eval m64.edje captions.jsonl --also m32.edje --queries 500 --cache scores
      edje-index eval photos.edje dataset_coco.json --split test --full
    """
    if report is not None:
        try:  # now, and not after a long evaluation
            report.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=report):
                pass
        except OSError as error:
            problem = f"cannot write the report to {report}: {error.strerror}"
            raise UsageError(f"{problem}; choose another directory") from error
    from edje_index.evaluation.evaluate import evaluate as measure
    from edje_index.evaluation.report import text_report, to_json, write_report
    from edje_index.evaluation.results import EvaluationConfig
    from pipelines.progress.display import progress_display
    from pipelines.progress.events import progress_callback

    config = EvaluationConfig(
        systems=((index, model), *map(index_and_model, also)),
        directions=DIRECTIONS if direction == "both" else (direction,),
        **settings,
    )
    try:
        with progress_display(quiet=quiet) as on_event:
            result = measure(config, progress_callback(on_event))
    except KeyboardInterrupt:
        if config.cache is not None:
            note(f"stopped; finished scores are kept. To resume: {this_command()}")
        raise
    for system in result.systems:
        if not system.trained:
            note(f"note: the model of {system.name} is untrained, so the order of its hits is random")
    if as_json:
        print_json(to_json(result))
    else:
        click.echo(text_report(result), nl=False)
    if report is not None:
        for path in write_report(result, report):
            note(f"wrote {path}")


def index_and_model(text: str) -> tuple[Path, Path | None]:
    """Parse "INDEX" or "INDEX=MODEL". An existing path that contains "=" is read as "INDEX"."""
    index, equals, model = text.rpartition("=")
    if not equals or Path(text).exists():
        return Path(text), None
    if not index or not model:
        raise UsageError(f"give INDEX or INDEX=MODEL, got '{text}'")
    return Path(index), Path(model)
