"""`edje-index eval`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipelines.cli.output import dtype_option, json_option, note, print_json, this_command
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.evaluation.config import EvaluationConfig
    from edje_index.evaluation.results import Evaluation

_POSITIVE = click.IntRange(min=1)
_PATH = click.Path(path_type=Path)


@click.command("eval")
@click.argument("index", type=_PATH)
@click.argument("captions", type=_PATH)
@click.option("--images", type=_PATH, help="Folder that image names begin at.  [default: that of CAPTIONS]")
@click.option("--split", metavar="NAME", help="Split of CAPTIONS to ask for.  [default: all of it]")
@click.option("--model", type=_PATH, help="Model bundle.  [default: the one that built INDEX]")
@click.option(
    "--also", multiple=True, metavar="INDEX[=MODEL]", help="Another index to compare with, and its bundle; repeatable."
)
@click.option(
    "--precision", "precisions", multiple=True, metavar="NAME", help="Tokens to use; repeatable.  [default: all held]"
)
@click.option("--simulate", is_flag=True, help="Convert precisions that INDEX does not hold in memory.")
@click.option(
    "--pool",
    "pools",
    type=_POSITIVE,
    multiple=True,
    help="Candidates that are re-ranked; repeatable.  [default: 10 20 50; 100 with --full]",
)
@click.option(
    "--direction", type=click.Choice(["both", "t2i", "i2t"]), default="both", show_default=True, help="What is asked."
)
@click.option(
    "--full", is_flag=True, help="Full-dataset protocol: all that INDEX and CAPTIONS hold may be answered; R@5/10/20."
)
@click.option(
    "--full-captions", type=_PATH, multiple=True, help="More captions that may be answered, with --full; repeatable."
)
@click.option("--rerank/--no-rerank", default=True, help="Re-rank, or measure the embeddings alone.")
@click.option("--queries", type=_POSITIVE, metavar="N", help="Ask N questions of each direction, drawn by --seed.")
@click.option("--bootstrap", type=click.IntRange(min=0), default=1000, show_default=True, help="Resamples; 0 for none.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of --queries and --bootstrap.")
@click.option("--cache", type=_PATH, help="Folder that keeps scores: an interrupted evaluation resumes from it.")
@click.option("--report", type=_PATH, help="Folder to write report.md, report.json and plots to.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="For the model."
)
@dtype_option
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def evaluate(report: Path | None, quiet: bool, as_json: bool, **options: object) -> None:
    """Measure the recall of INDEX on captioned images, by embedding alone and re-ranked.

    CAPTIONS is our .jsonl, Karpathy's .json (COCO, Flickr30k), COCO's caption .json, .parquet, or a WebDataset .tar.
    A caption asks for its image; an image asks for any of its captions. Candidates are the images of CAPTIONS (of its
    split) and their captions; with --full every image of INDEX and the captions of all splits.

    \b
    Examples:
      edje-index eval photos.edje captions.jsonl --split dev --precision bf16 --precision fp8 --report out
      edje-index eval photos.edje dataset_flickr30k.json --images flickr30k-images --split test --pool 10
      edje-index eval m64.edje captions.jsonl --also m32.edje --queries 500 --cache scores
      edje-index eval photos.edje dataset_coco.json --split test --full
    """
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
            note(f"stopped; the scores so far are kept. To resume: {this_command()}")
        raise
    _show(result, report, as_json=as_json)


def _config(**options: object) -> EvaluationConfig:
    from edje_index.evaluation.config import DIRECTIONS, EvaluationConfig

    chosen = dict(options)
    direction = chosen.pop("direction")
    index, model, also = chosen.pop("index"), chosen.pop("model"), chosen.pop("also")
    assert isinstance(index, Path)
    assert isinstance(also, tuple)
    systems = ((index, model if isinstance(model, Path) else None), *map(_other, also))
    chosen["resamples"] = chosen.pop("bootstrap")
    directions = DIRECTIONS if direction == "both" else (direction,)
    return EvaluationConfig(systems=systems, directions=directions, **chosen)  # type: ignore[arg-type]


def _other(text: str) -> tuple[Path, Path | None]:
    """INDEX or INDEX=MODEL; an index whose name holds a "=" is found first."""
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
            note(f"note: the weights that {system.name} is searched with are untrained; its recall is that of chance")
    if as_json:
        print_json(to_json(result))
    else:
        click.echo(text_report(result), nl=False)
    if report is not None:
        for path in write_report(result, report):
            note(f"wrote {path}")


def _make(folder: Path) -> None:
    """The folder of the report, now rather than after hours. UsageError where nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write the report into {folder}: {error.strerror}") from error
