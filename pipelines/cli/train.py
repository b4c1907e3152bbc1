"""`edje-index train`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edje_index.scoring.weights import ScoreWeights
from pipelines.cli.output import json_option, print_json, this_command
from pipelines.cli.train_options import DEVICES, config_options, read_request

if TYPE_CHECKING:
    from edje_index.training.config import TrainConfig
    from pipelines.jobs.train_request import TrainRequest, TrainResult

_PATH = click.Path(path_type=Path)
_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("captions", nargs=-1, type=_PATH, metavar="CAPTIONS...")
@click.option("--out", type=_PATH, help="Folder of the bundle to write.")
@click.option("--config", "config_file", type=_PATH, help="TOML file with any of these settings; options win.")
@click.option("--images", type=_PATH, help="Folder that image names begin at.  [default: that of CAPTIONS]")
@click.option("--split", help="Take this split of CAPTIONS alone.")
@click.option("--model", type=_PATH, help="Bundle with the frozen image and text tower.")
@click.option("--vision", metavar="NAME", help="The towers by their name in open_clip, instead of --model.")
@click.option("--language", type=_PATH, help="Folder of a BERT, or bundle, to begin the joint encoder with.")
@click.option("--features", type=_PATH, help="Index of the tower's features.  [default: made in --run-dir]")
@click.option("--view-features", type=_PATH, help="Index of --views that another run made: its RUN/views.edje.")
@click.option("--init", type=_PATH, help="Bundle to go on from: its joint encoder, and its adapter where it fits.")
@click.option("--teacher", type=_PATH, help="Bundle to distil from.")
@click.option("--teacher-features", type=_PATH, help="Index that the teacher built.  [default: the features]")
@click.option("--miner", type=_PATH, help="Bundle whose embeddings mine negatives.  [default: the towers]")
@click.option("--miner-features", type=_PATH, help="Index that the miner built.  [default: made in --run-dir]")
@click.option("--dev", type=_PATH, help="Captions that the weights of the final score are fitted to.")
@click.option("--dev-split", help="Take this split of --dev alone.")
@click.option("--run-dir", type=_PATH, help="Folder of checkpoints and log.  [default: OUT.run]")
@config_options
@click.option("--workers", type=_POSITIVE, help="WorkerGroup; more than one run on Ray.  [default: 1]")
@click.option("--address", metavar="HOST:PORT", help="Head of a Ray cluster to join; the run folder must be shared.")
@click.option("--device", type=click.Choice(DEVICES), help="Where to train.  [default: auto]")
@click.option("--threads", type=_POSITIVE, help="CPU threads of a rank.  [default: torch's]")
@click.option("--checkpoint-every", type=_POSITIVE, help="Steps between checkpoints.  [default: 200]")
@click.option("--log-every", type=_POSITIVE, help="Steps between lines of the log.  [default: 10]")
@click.option("--compile", "compile", is_flag=True, help="Use torch.compile.")
@click.option("--export", is_flag=True, help="Write the bundle of the last checkpoint and train no further.")
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def train(as_json: bool, quiet: bool, config_file: Path | None, **options: Any) -> None:
    """Train adapter and joint encoder on CAPTIONS over a frozen vision tower, and write a model bundle.

    CAPTIONS are files of captions: JSONL, COCO or Karpathy JSON, Parquet, WebDataset tar. The tower's features are
    computed once, into an index in the run folder, so that epochs cost no vision model. The two phases of the paper are
    two commands: pretrain, then finetune with --init. The same command, run again, goes on from the last checkpoint.

    \b
    Examples:
      edje-index train captions.jsonl --images photos --model clip --language minilm --steps 5000 --out model
      edje-index train captions.jsonl --model clip --language minilm --adapter local --epochs 5 --out teacher
      edje-index train captions.jsonl --model clip --init teacher --teacher teacher --epochs 5 --out student
      edje-index train --config student.toml --phase finetune --init student --out tuned
    """
    request, config = read_request(options, config_file)
    result = _run(request, config, quiet=quiet)
    if as_json:
        print_json(asdict(result))
        return
    if result.already_finished:
        click.echo(f"{result.bundle} is finished already; nothing was done")
    weights = (result.embedding_weight, result.late_weight, result.pooled_weight, result.prior_weight)
    click.echo(
        f"{result.bundle}: {result.steps:,} steps on {result.images:,} images with {result.captions:,} captions, "
        f"{result.seconds:.1f} s"
    )
    click.echo(f"score of images: {ScoreWeights(*weights).described()}")
    if result.caption_weights:
        click.echo(f"score of captions: {ScoreWeights(**result.caption_weights).described()}")
    if result.dev:
        for asked, choice in result.dev.items():
            click.echo(_describe_choice(asked, choice))
    if result.bank_unused:
        click.echo("the query bank made nothing likelier on --dev: it has no weight and was left out")


def _describe_choice(asked: str, choice: dict[str, Any]) -> str:
    """What --dev says of the score that `asked` are sorted by."""
    of = "images" if asked == "captions" else "captions"
    held_out = choice.get("held_out_recall")  # runs that an earlier version finished lack it
    others = "" if held_out is None else f"{held_out:.1%} with weights fitted to other images, "
    return (
        f"R@1 of {asked} for {choice['queries']:,} dev {of}, pool {choice['pool']}: embeddings "
        f"{choice['embedding_recall']:.1%}, final {others}{choice['recall']:.1%} with weights fitted to the same"
    )


def _run(request: TrainRequest, config: TrainConfig, *, quiet: bool) -> TrainResult:
    from pipelines.jobs.train import run_training
    from pipelines.progress.display import progress_display
    from pipelines.progress.stopping import JobStopped, stop_on_signals

    try:
        with stop_on_signals() as should_stop, progress_display(quiet=quiet) as on_event:
            return run_training(request, config, on_event, should_stop)
    except (JobStopped, KeyboardInterrupt) as error:
        raise JobStopped(f"{str(error) or 'interrupted'}. To resume: {this_command()}") from error
