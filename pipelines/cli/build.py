"""The command `edje-index build`."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli.dry_run import show_dry_run
from pipelines.cli.options import (
    DTYPE,
    LOCAL_INDEX,
    PATH,
    POSITIVE,
    address_option,
    column_option,
    device_option,
    dry_run_option,
    engine_option,
    frames_option,
    json_option,
    log_option,
    max_failed_option,
    memory_option,
    quiet_option,
    shard_size_option,
    stored_precisions_option,
    truncated_option,
)
from pipelines.cli.output import naming_max_failed, note, print_json, print_line, running_job
from pipelines.planning.config import BuildConfig
from pipelines.planning.output import has_stored_work
from pipelines.progress.wording import counted
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from pipelines.jobs.build_result import BuildResult

_NO_MODEL = (
    "no model: name a model bundle with --model. 'edje-index model get' writes a small trained bundle; "
    "'edje-index model import' converts a trained checkpoint"
)


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--out", required=True, type=LOCAL_INDEX, help="Directory of the new index.")
@click.option("--model", type=PATH, help="Directory of the model bundle.")
@engine_option("ray")
@click.option(
    "--workers",
    type=POSITIVE,
    help="Number of worker processes.  [default: number of GPUs, or number of CPUs divided by --threads, but only as "
    "many as the memory has room for]",
)
@click.option(
    "--threads", type=POSITIVE, help="Number of CPU threads per worker.  [default: number of CPUs, at most 4]"
)
@address_option
@shard_size_option
@click.option(
    "--batch-size", type=POSITIVE, help="Number of images per forward pass.  [default: 8 on a CPU, 32 on cuda]"
)
@device_option
@click.option(
    "--dtype",
    type=DTYPE,
    help="Data type of the model's matrix products. auto is bfloat16 on cuda and on CPUs with bfloat16 instructions, "
    "and float32 on other CPUs.  [default: bfloat16 on cuda, float32 on cpu]",
)
@stored_precisions_option
@click.option("--dedupe", is_flag=True, help="Encode byte-identical images only once.")
@column_option
@max_failed_option
@click.option("--max-pixels", type=POSITIVE, help="Fail images with more pixels than this.  [default: 89478485]")
@truncated_option
@frames_option
@memory_option
@dry_run_option
@log_option
@quiet_option
@json_option
def build(as_json: bool, quiet: bool, dry_run: bool, **options: Any) -> None:
    """Build a new index of the images in every SOURCE.

    A SOURCE is a directory, a tar or zip archive, a Parquet file of images, an image file, or a list of paths (Parquet,
    CSV, TSV, JSON Lines or text, or - for standard input). Directories are searched recursively. Quoted patterns such
    as 'shards/{0000..0015}.tar' and 'data/*.parquet' name several files. A SOURCE can also be a URL that begins with
    https://, s3://, gs://, az:// or hf://.

    An image that cannot be read becomes a failed row. 'edje-index failures' lists the failed rows with their reasons.
    If more images fail than --max-failed allows, the build stops with exit code 1 and keeps the finished shards.

    Run the same command again to resume a stopped build. If the index is already finished, the command does nothing.

    \b
    Examples:
      edje-index build photos --out photos.edje --model model
      edje-index build 'cc3m/{00000..00331}.tar' --out cc3m.edje --model model --dedupe
      edje-index build 'data/train-*.parquet' --column image --out hf.edje --model model
      edje-index build s3://bucket/photos --out photos.edje --model model
      find photos -name '*.jpg' | edje-index build - --out found.edje --model model
      edje-index build list.parquet --column image_path --out list.edje --model model --device cuda
      edje-index build photos --out photos.edje --model model --memory 8G
      edje-index build photos --out photos.edje --model model --address head:6379
      edje-index build clips --out clips.edje --model model --frames 8
    """
    if options["model"] is None:
        raise UsageError(_NO_MODEL)
    from pipelines.jobs.build import run_build

    options["sources"], options["precisions"] = tuple(options["sources"]), tuple(options["precisions"])
    config = BuildConfig(**options)
    if dry_run:
        from pipelines.jobs.dry_run import try_build

        show_dry_run(functools.partial(try_build, config), config.out, quiet=quiet, as_json=as_json)
        return
    can_resume = functools.partial(has_stored_work, config.out)
    job = running_job(quiet=quiet, can_resume=can_resume)
    with job as (on_event, should_stop), naming_max_failed():
        result = run_build(config, on_event, should_stop)
    if as_json:
        print_json(asdict(result))
    else:
        _print(result, config.out)
    if result.failed:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in result.failed_by_reason.items())
        note(f"{counted(result.failed, 'input')} failed: {reasons}; 'edje-index failures {config.out}' lists them")
    if result.truncated:
        note(f"{counted(result.truncated, 'truncated image')} indexed, but decoded only in part")


def _print(result: BuildResult, out: Path) -> None:
    if result.already_finished:
        print_line(f"{out} is already finished; nothing was done")
    print_line(
        f"{out}: {counted(result.inputs, 'input')} = {result.indexed:,} indexed + {result.duplicates:,} duplicates "
        f"+ {result.failed:,} failed, in {counted(result.shards, 'shard')}"
    )
    if not result.already_finished:
        parts = [f"{result.seconds:.1f} s"]
        if result.images_per_second:
            parts += [f"{result.images_per_second:.1f} images/s", f"bottleneck {result.bottleneck or 'none'}"]
        print_line(", ".join(parts))
