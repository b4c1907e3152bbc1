"""The command `edje-index eval`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edje_index.scoring.weights import BUNDLE_SCORE, DIRECTIONS
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

if TYPE_CHECKING:
    from edje_index.evaluation.config import EvaluationConfig
    from edje_index.evaluation.results import Evaluation


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
    help="Token precision to evaluate; repeatable.  [default: all precisions stored in INDEX]",
)
@click.option(
    "--simulate",
    is_flag=True,
    help="Evaluate also precisions that INDEX does not store. The tokens are converted in memory.",
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
@click.option(
    "--full-captions",
    type=PATH,
    metavar="FILE",
    multiple=True,
    help="With --full: another file with candidate captions; repeatable.",
)
@joint_pool_option
@score_option
@click.option("--rerank/--no-rerank", default=True, help="Evaluate with re-ranking, or evaluate the embeddings alone.")
@click.option("--queries", type=POSITIVE, metavar="N", help="Sample N queries per direction.  [default: all queries]")
@click.option(
    "--bootstrap",
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
def evaluate(report: Path | None, quiet: bool, as_json: bool, **options: Any) -> None:
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
    if options["full_captions"] and not options["full"]:
        raise UsageError("--full-captions needs --full; add --full")
    if not options["rerank"] and options["score"] != BUNDLE_SCORE:
        raise UsageError("--score has no effect with --no-rerank: leave out --score or --no-rerank")
    if not options["rerank"] and options["joint_pool"] is not None:
        raise UsageError("--joint-pool has no effect with --no-rerank: leave out --joint-pool or --no-rerank")
    config = _config(**options)
    if report is not None:
        _make(report)
    from edje_index.evaluation.evaluate import evaluate as measure
    from pipelines.progress.display import progress_display
    from pipelines.progress.events import progress_callback

    try:
        with progress_display(quiet=quiet) as on_event:
            result = measure(config, progress_callback(on_event))
    except KeyboardInterrupt:
        if config.cache is not None:
            note(f"stopped; finished scores are kept. To resume: {this_command()}")
        raise
    _show(result, report, as_json=as_json)


def _config(
    *, index: Path, model: Path | None, also: tuple[str, ...], direction: str, bootstrap: int, **settings: Any
) -> EvaluationConfig:
    from edje_index.evaluation.config import EvaluationConfig

    systems = ((index, model), *map(_other, also))
    directions = DIRECTIONS if direction == "both" else (direction,)
    return EvaluationConfig(systems=systems, directions=directions, resamples=bootstrap, **settings)


def _other(text: str) -> tuple[Path, Path | None]:
    """Parse "INDEX" or "INDEX=MODEL". An existing path that contains "=" is read as "INDEX"."""
    index, equals, model = text.rpartition("=")
    if not equals or Path(text).exists():
        return Path(text), None
    if not index or not model:
        raise UsageError(f"--also takes INDEX or INDEX=MODEL, got '{text}'")
    return Path(index), Path(model)


def _show(result: Evaluation, report: Path | None, *, as_json: bool) -> None:
    from edje_index.evaluation.report import text_report, to_json, write_report

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


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write the report to {folder}: {error.strerror}; choose another directory") from error
