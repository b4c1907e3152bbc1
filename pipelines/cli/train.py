"""The command `edje-index train`."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edje_index.scoring.weights import ScoreWeights
from pipelines.cli.options import DEVICE, PATH, images_option, json_option, quiet_option
from pipelines.cli.output import print_json, print_line, running_job
from pipelines.progress.wording import counted
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from pipelines.jobs.training.run import TrainResult


@click.command()
@click.argument("captions", nargs=-1, type=PATH, metavar="CAPTIONS...")
@click.option("--out", type=PATH, help="Directory of the bundle to write.")
@images_option
@click.option(
    "--dev",
    type=PATH,
    metavar="FILE",
    help="File of captions of images that are not in CAPTIONS. The weights of the final score are fitted to this file.",
)
@click.option("--model", type=PATH, help="Bundle with the frozen vision and text towers.")
@click.option("--vision", metavar="NAME", help="open_clip name of the frozen towers, instead of --model.")
@click.option(
    "--language", type=PATH, help="Initial language model: directory of a Hugging Face BERT model, or a bundle."
)
@click.option(
    "--init",
    type=PATH,
    help="Bundle with the initial weights of the joint encoder and, if the sizes match, of the adapter.",
)
@click.option(
    "--features",
    metavar="INDEX|online",
    help="Index that stores the features of the vision tower. 'online' computes the features in every step, and "
    "stores no features.",
)
@click.option(
    "--preset",
    type=click.Choice(["paper", "paper-finetune", "small-data"]),
    default="paper",
    show_default=True,
    help="Named set of settings to start from.",
)
@click.option(
    "--config", "config_file", type=PATH, metavar="FILE", help="TOML file with settings, which override the preset."
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="GROUP.KEY=VALUE",
    help="Value of one setting; overrides --config. Repeatable.",
)
@click.option("--show-settings", is_flag=True, help="Print every setting with its description, as TOML, and exit.")
@click.option("--steps", type=int, help="Number of optimiser steps.")
@click.option("--epochs", type=float, help="Number of passes over all captions, instead of --steps.")
@click.option("--workers", type=int, help="Number of worker processes; several processes run on Ray.  [default: 1]")
@click.option(
    "--device", type=DEVICE, help="Device to train on. auto uses cuda if a CUDA device is available.  [default: auto]"
)
@quiet_option
@json_option
def train(
    as_json: bool,
    quiet: bool,
    preset: str,
    config_file: Path | None,
    assignments: tuple[str, ...],
    show_settings: bool,
    **options: Any,
) -> None:
    """Train an adapter and a joint encoder on CAPTIONS with a frozen vision tower, and write a model bundle.

    CAPTIONS are files in JSONL, COCO or Karpathy JSON, Parquet or WebDataset tar format. The features of the vision
    tower are computed once and stored in the run folder OUT.run, unless --features is given. Run the same command again
    to resume an interrupted training run.

    Settings come from --preset, --config, --set and the other options, in this order; later values override earlier
    values. --show-settings lists all settings.

    \b
    Presets:
      paper           first training phase of the EDJE paper, for millions of images
      paper-finetune  second training phase of the EDJE paper; use with --init
      small-data      for thousands of images on a CPU; needs --dev

    \b
    Examples:
      edje-index train captions.jsonl --images photos --model clip --language minilm --steps 5000 --out model
      edje-index train more.jsonl --model clip --preset paper-finetune --init model --epochs 5 --out tuned
      edje-index train captions.jsonl --dev dev.jsonl --model clip --language minilm --preset small-data --out model
      edje-index train captions.jsonl --model clip --language minilm --epochs 5 --set architecture.adapter=local \\
        --out teacher
      edje-index train captions.jsonl --model clip --init teacher --set inputs.teacher=teacher --epochs 5 --out student
      edje-index train --preset small-data --show-settings > settings.toml
    """
    from edje_index.training.config import TrainSettings, validated
    from pipelines.cli.train_settings import DEDICATED_OPTIONS, describe_settings, read_settings

    values = read_settings(preset, config_file, assignments, options)
    if show_settings:
        print_json({"settings": describe_settings(values)}) if as_json else click.echo(describe_settings(values))
        return
    from pipelines.jobs.training.run import run_training

    try:
        settings = validated(TrainSettings, values)
        with running_job(quiet=quiet) as (on_event, should_stop):
            result = run_training(settings, on_event, should_stop)
    except UsageError as error:  # an option is named beside its setting, for example "loop.steps (--steps)"
        flags = {name: f"--{option.replace('_', '-')}" for option, name in DEDICATED_OPTIONS.items()}
        flags["inputs.captions"] = "CAPTIONS"
        names = "|".join(map(re.escape, flags))
        message = re.sub(rf"\b({names})\b", lambda match: f"{match[1]} ({flags[match[1]]})", str(error))
        raise UsageError(message) from error
    if as_json:
        print_json(asdict(result))
    else:
        for line in describe_result(result):
            print_line(line)


def describe_result(result: TrainResult) -> list[str]:
    """Return lines of text that describe the result of a training run."""
    lines = [f"{result.bundle} is already finished; nothing was done"] if result.already_finished else []
    lines.append(
        f"{result.bundle}: {result.steps:,} steps on {result.images:,} images with {result.captions:,} captions, "
        f"{result.seconds:.1f} s"
    )
    images = dict(result.left_out)
    blank = images.pop("blank-caption", 0)
    if images:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in images.items())
        lines.append(f"{counted(sum(images.values()), 'image')} left out: {reasons}")
    if blank:
        lines.append(f"{counted(blank, 'blank caption')} left out")
    if result.truncated:
        lines.append(f"{counted(result.truncated, 'truncated image')} used, but decoded only in part")
    weights = {direction: ScoreWeights.from_json(values) for direction, values in result.score.items()}
    lines += [f"{direction} score: {part.described()}" for direction, part in weights.items()]
    lines += [_describe_choice(candidates, choice) for candidates, choice in (result.dev or {}).items()]
    if result.fitting.get("hubness_bank") and not any(part.hubness for part in weights.values()):
        lines.append("the hubness correction did not improve the likelihood of the dev captions and was left out")
    return lines


def _describe_choice(candidates: str, choice: dict[str, Any]) -> str:
    """Return one line on the dev recall of `candidates` ("images" or "captions") with the fitted weights."""
    queries = "images" if candidates == "captions" else "captions"
    held_out = choice["held_out_recall"]
    cross_validated = "" if held_out is None else f"final {held_out:.1%} with weights fitted to other images, "
    return (
        f"R@1 of {candidates} for {choice['queries']:,} dev {queries}, pool {choice['pool']}: embeddings "
        f"{choice['embedding_recall']:.1%}, {cross_validated}{choice['recall']:.1%} with weights fitted to "
        "the same images"
    )
