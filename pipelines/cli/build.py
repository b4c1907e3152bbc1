"""`edje-index build`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli.output import json_option, note, print_json, this_command
from pipelines.planning.config import BATCH_SIZE, SHARD_SIZE, BuildConfig
from storage_formats.errors import UsageError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from pipelines.jobs.build import BuildResult

_NO_MODEL = (
    "no model: give a bundle with --model. 'edje-index init-model DIR' makes one of random weights, "
    "'edje-index import-checkpoint' one of a trained checkpoint"
)
_PATH = click.Path(path_type=Path)
_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--out", required=True, type=_PATH, help="Folder of the index.")
@click.option("--model", type=_PATH, help="Folder of the model bundle.")
@click.option(
    "--engine", type=click.Choice(["ray", "inline"]), default="ray", show_default=True, help="What runs the workers."
)
@click.option(
    "--workers", type=_POSITIVE, help="Processes that hold a model.  [default: CPUs over --threads, or one a GPU]"
)
@click.option("--threads", type=_POSITIVE, help="CPU threads of each model.  [default: the CPUs, at most 4]")
@click.option("--address", metavar="HOST:PORT", help="Head of a Ray cluster to join.  [default: a Ray of its own]")
@click.option("--shard-size", type=_POSITIVE, default=SHARD_SIZE, show_default=True, help="Images a shard.")
@click.option("--batch-size", type=_POSITIVE, default=BATCH_SIZE, show_default=True, help="Images a forward pass.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the model runs.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Type of matrix products; auto is bfloat16 on cuda, float32 on cpu.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    default=["bf16"],
    show_default=True,
    help="Tokens to store; may be repeated.",
)
@click.option("--dedupe", is_flag=True, help="Encode byte-identical images once.")
@click.option("--column", metavar="NAME", help="Column of paths in a list.  [default: path, image, file, uri, ...]")
@click.option("--max-pixels", type=_POSITIVE, help="Larger images become failed rows.  [default: 89478485]")
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def build(as_json: bool, quiet: bool, **options: Any) -> None:
    """Index the images of every SOURCE into one new index.

    A SOURCE is a folder (searched with its subfolders), a WebDataset tar ('shards/{0000..0015}.tar' stands for many), a
    Parquet, CSV or JSONL list with a column of paths, or an image file. An image that cannot be read becomes a row
    with the reason and never ends the build.

    The same command, run again, resumes a build that was stopped, and does nothing where the index is finished.

    \b
    Examples:
      edje-index build photos --out photos.edje --model model
      edje-index build 'cc3m/{00000..00331}.tar' --out cc3m.edje --model model --dedupe
      edje-index build list.parquet --column image_path --out list.edje --model model --device cuda
      edje-index build photos --out photos.edje --model model --address head:6379
    """
    if options["model"] is None:
        raise UsageError(_NO_MODEL)
    options["sources"], options["precisions"] = tuple(options["sources"]), tuple(options["precisions"])
    result = _run(BuildConfig(**options), quiet=quiet)
    if as_json:
        print_json(asdict(result))
    else:
        _print(result, options["out"])
    if result.failed:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in result.failed_by_reason.items())
        note(f"{result.failed:,} inputs failed: {reasons}; the rows table names each")


def _run(config: BuildConfig, *, quiet: bool) -> BuildResult:
    """Build with progress on standard error; an error that a second run resumes from says how."""
    from pipelines.jobs.build import run_build
    from pipelines.progress.display import progress_display
    from pipelines.progress.stopping import JobStopped, stop_on_signals

    try:
        with stop_on_signals() as should_stop, progress_display(quiet=quiet) as on_event:
            return run_build(config, on_event, should_stop)
    except (JobStopped, KeyboardInterrupt) as error:
        if Layout(config.out).plan.exists():
            raise JobStopped(f"{str(error) or 'interrupted'}. To resume: {this_command()}") from error
        raise


def _print(result: BuildResult, out: Path) -> None:
    if result.already_finished:
        click.echo(f"{out} is finished already; nothing was done")
    click.echo(
        f"{out}: {result.inputs:,} inputs = {result.indexed:,} indexed + {result.duplicates:,} duplicates "
        f"+ {result.failed:,} failed, in {result.shards:,} shards"
    )
    if result.images_per_second:
        click.echo(
            f"{result.seconds:.1f} s, {result.images_per_second:.1f} images/s, bottleneck {result.bottleneck or 'none'}"
        )
