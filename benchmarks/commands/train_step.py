"""The command `edje-index bench train-step`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.commands.output import show
from pipelines.cli.options import dtype_option, json_option


@click.command("train-step")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    required=True,
    help="New directory for a random model and random features.",
)
@click.option("--images", type=click.IntRange(min=8), default=1024, show_default=True, help="Number of random images.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=2),
    default=16,
    show_default=True,
    help="Number of caption-image pairs per step.",
)
@click.option(
    "--negatives", type=click.IntRange(min=1), default=3, show_default=True, help="Number of hard negatives per pair."
)
@click.option("--dropout", type=float, default=0.1, show_default=True, help="Dropout of the language model.")
@dtype_option
@click.option(
    "--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Number of CPU threads of torch."
)
@click.option(
    "--windows", type=click.IntRange(min=1), default=5, show_default=True, help="Number of timed runs of each variant."
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=4, show_default=True, help="Number of training steps per timed run."
)
@json_option
def train_step_command(folder: Path, as_json: bool, **options: Any) -> None:
    """Compare the duration of a training step with the forward and backward passes of the model on prepared tensors.

    \b
    Example:
      edje-index bench train-step --folder /tmp/bench
    """
    from benchmarks.train_step import TrainStepCase, bench_train_step

    report = bench_train_step(folder, TrainStepCase(**options))
    lines = [f"{name:17} {value:8.3f} s" for name, value in report["median"].items()]
    lines += [f"{name:17} {value:8.2f}" for name, value in report["ratios"].items()]
    show(report, as_json, [*lines, f"{'waiting for data':17} {report['waiting_for_data']:8.1%}"])
