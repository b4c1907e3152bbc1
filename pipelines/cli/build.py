"""The commands `edje-index build`, `append`, `update` and `import-arrays`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edje_index.models import MAX_FRAMES
from pipelines.cli.options import (
    DTYPE,
    POSITIVE,
    address_option,
    column_option,
    command,
    device_option,
    engine_option,
    index_argument,
    json_option,
    max_failed_option,
    model_option,
    option,
    out_index_option,
    quiet_option,
    shard_size_option,
    size,
    stored_precisions_option,
)
from pipelines.cli.output import note, print_result, run_job
from pipelines.progress.wording import busy_text, by_reason, counted, human_bytes
from storage_formats.errors import UsageError
from storage_formats.remote.urls import IndexLocation

if TYPE_CHECKING:
    from pipelines.jobs.build import BuildResult


_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_NO_MODEL = (
    "no model: name a model with --model: 'edje' (the trained model of the EDJE paper's"
    " authors, from the Hugging Face Hub), 'demo' (a small model, without the Hub), or"
    " the directory of a model bundle"
)


@command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@out_index_option
@option("--model")
@engine_option
@option("--workers", POSITIVE)
@option("--helpers", click.IntRange(0))
@option("--threads", POSITIVE)
@address_option
@shard_size_option
@option("--batch-size", POSITIVE)
@device_option
@option("--dtype", DTYPE)
@stored_precisions_option
@option("--dedupe", bool)
@column_option
@option(
    "--include",
    multiple=True,
    metavar="PATTERN",
)
@option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
)
@max_failed_option
@option("--max-pixels", POSITIVE)
@option(
    "--truncated",
    click.Choice(["fail", "load"]),
    default="fail",
)
@option(
    "--frames",
    click.IntRange(1, MAX_FRAMES),
    metavar="N",
)
@option(
    "--memory",
    size,
    metavar="SIZE",
)
@option("--dry-run", bool)
@quiet_option
@json_option
def build(dry_run: bool, **options: Any) -> None:
    """Build a new index of the images in every SOURCE.

    A SOURCE is a directory, an archive (tar, zip), a Parquet file of images, an image
    file, or a list of paths (Parquet, CSV, TSV, JSON Lines or text, or - for standard
    input). Directories are searched recursively. Quoted patterns such as
    'shards/{0000..0015}.tar' and 'data/*.parquet' name several files. A SOURCE can also
    be a URL that begins with https://, s3://, gs://, az:// or hf://.

    An image that cannot be read becomes a failed row. 'edje-index failures'
    lists the failed rows with their reasons. If more images fail than --max-failed
    allows, the build stops with exit code 1 and keeps the finished shards.

    Run the same command again to resume a stopped build. If the index is already
    finished, the command does nothing.

    \b
    Examples:
      edje-index build photos --out photos.edje --model model
      edje-index build 'cc3m/{00000..00331}.tar' --out cc3m.edje --model model --dedupe
      edje-index build 'data/train-*.parquet' --column image --out hf.edje --model model
      edje-index build photos --out photos.edje --model model --exclude '*.png' \\
        --exclude '/screenshots/'
      edje-index build s3://bucket/photos --out photos.edje --model model
      find photos -name '*.jpg' | edje-index build - --out found.edje --model model
      edje-index build list.parquet --column image_path --out list.edje \\
        --model model --device cuda
      edje-index build photos --out photos.edje --model model --memory 8G
      edje-index build photos --out photos.edje --model model --address head:6379
      edje-index build clips --out clips.edje --model model --frames 8

    Options:
        --model: Directory of the model bundle, or a model of 'model get', such as edje.
        --workers: Number of worker processes, which share the GPUs.  [default: twice
            the number of GPUs, or number of CPUs divided by --threads, but only as many
            as the memory has room for]
        --helpers: Number of processes per worker that read, decode and resize images.
            [default: --threads on a CPU, a share of the CPUs on cuda]
        --threads: Number of CPU threads per worker.  [default: number of CPUs, at most
            4]
        --batch-size: Number of images per forward pass.  [default: 8 on a CPU, 128 on
            cuda]
        --dtype: Data type of the model's matrix products. auto is bfloat16 on cuda and
            on CPUs with bfloat16 instructions, and float32 on other CPUs.  [default:
            bfloat16 on cuda, float32 on cpu]
        --dedupe: Encode byte-identical images only once.
        --include: Use only the inputs that match a pattern as in .gitignore;
            repeatable.
        --exclude: Leave out the inputs that match a pattern as in .gitignore;
            repeatable.
        --max-pixels: Fail images with more pixels than this.  [default: 89478485]
        --truncated: What to do with a truncated image: fail makes a failed row, load
            indexes the readable part of the image.
        --frames: Also index videos: encode N evenly spaced frames of each
            video.  [default: ignore videos]
        --memory: Plan for at most this much memory on this machine, for example 500M or
            8G.  [default: the free memory]
        --dry-run: Show the work, and the disk space and memory that it needs. Write
            nothing.
    """
    if options["model"] is None:
        raise UsageError(_NO_MODEL)
    from pipelines.jobs.build import build_index
    from pipelines.jobs.hub import find_model
    from pipelines.jobs.resources import described

    options["model"] = find_model(options["model"], note)
    out = options["out"]
    resume = not dry_run and out
    result = run_job(build_index, resume=resume, dry_run=dry_run, **options)
    if result.estimate is not None:
        needs = result.estimate
        shards = counted(result.shards, "shard")
        if needs["finished_shards"]:
            shards += f", {needs['finished_shards']:,} finished"
        lines = [
            f"{counted(result.inputs, 'input')} = {result.indexed:,} to encode +"
            f" {result.duplicates:,} duplicates + {result.failed:,} that cannot be"
            " read",
            f"{counted(result.rows, 'row')} in {shards}",
            f"disk {described(needs['disk_bytes'])};"
            f" {human_bytes(needs['free_disk_bytes'])} free",
            f"memory at least {described(needs['memory_bytes'])};"
            f" {human_bytes(needs['free_memory_bytes'])} available",
        ]
        print_result(result, *(f"{out}: {line}" for line in lines))
        return
    counts = (
        f"{out}: {counted(result.inputs, 'input')} = {result.indexed:,} indexed +"
        f" {result.duplicates:,} duplicates + {result.failed:,} failed, in"
        f" {counted(result.shards, 'shard')}"
    )
    speed = f"{result.seconds:.1f} s"
    if result.images_per_second:
        speed += (
            f", {result.images_per_second:.1f} images/s, bottleneck"
            f" {result.bottleneck or 'none'}"
        )
        speed += f" ({busy_text(result.busy)})" if result.busy else ""
    lines = [counts, speed]
    if result.already_finished:
        lines = [f"{out} is already finished; nothing was done", counts]
    print_result(result, *lines)
    _note_failures(result, out)
    if result.truncated:
        note(
            f"{counted(result.truncated, 'truncated image')} indexed, but decoded only"
            " in part"
        )


def _note_failures(result: BuildResult, index: IndexLocation) -> None:
    if result.failed:
        reasons = by_reason(result.failed_by_reason)
        note(
            f"{counted(result.failed, 'input')} failed: {reasons}; 'edje-index"
            f" failures {index}' lists them"
        )


@command()
@index_argument
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@column_option
@max_failed_option
@model_option
@engine_option
@quiet_option
@json_option
def append(
    index: IndexLocation,
    sources: tuple[str, ...],
    **options: Any,
) -> None:
    """Add the images of every SOURCE to INDEX.

    'edje-index build --help' describes SOURCE. New rows are encoded with the settings
    of INDEX. Images that INDEX already contains are skipped and reported as duplicates.
    Existing rows keep their ids. INDEX can be searched during the append.

    Run the same command again to resume a stopped append.

    \b
    Examples:
      edje-index append photos.edje photos/2026
      edje-index append cc3m.edje 'cc3m/{00332..00340}.tar' --engine inline
    """
    from pipelines.jobs.update import append_index

    result = run_job(append_index, index, sources, resume=index, **options)
    at = "" if result.first_row is None else f" (row ids from {result.first_row:,})"
    line = (
        f"{index}: {counted(result.inputs, 'input')} = {result.indexed:,} indexed{at} +"
        f" {result.duplicates:,} duplicates + {result.failed:,} failed, in"
        f" {counted(result.shards, 'new shard')}; {result.seconds:.1f} s"
    )
    print_result(result, line)
    _note_failures(result, index)


@command()
@index_argument
@click.argument("sources", nargs=-1, metavar="[SOURCE...]")
@option("--dry-run", bool)
@option("--retry-failed", bool)
@option("--restore", bool)
@option(
    "--max-vanished",
    click.FloatRange(0, 1),
    metavar="SHARE",
    default=0.5,
)
@max_failed_option
@model_option
@engine_option
@quiet_option
@json_option
def update(
    index: IndexLocation,
    sources: tuple[str, ...],
    **options: Any,
) -> None:
    """Add, replace and delete rows so that INDEX matches its sources.

    Without SOURCE, the command uses the sources recorded in INDEX. If you give SOURCE,
    name all sources of INDEX, because the rows of other sources are deleted.
    'edje-index build --help' describes SOURCE.

    New and changed files get new rows. The old rows of changed files and the rows of
    missing files are deleted. Unchanged files are read but not encoded again; if their
    captions or other columns changed, only these are replaced. Rows that 'edje-index
    delete' removed stay deleted until --restore. A program that has INDEX open must
    reopen it to see the changes.

    With --retry-failed, the failed inputs that 'edje-index failures' lists are tried
    again, too. If nothing else has changed and every input fails again, INDEX does not
    change.

    If a source cannot be read, or too many files are missing, the command stops without
    changing INDEX.

    \b
    Examples:
      edje-index update photos.edje --dry-run
      edje-index update photos.edje
      edje-index update photos.edje --retry-failed

    Options:
        --dry-run: Show the changes without applying them.
        --retry-failed: Also try again to index failed inputs that have not changed.
        --restore: Also index again the files whose rows 'edje-index delete' removed.
        --max-vanished: Stop if the files of more than this share of the rows are
            missing.
    """
    from pipelines.jobs.update import update_index

    resume = not options["dry_run"] and index
    result = run_job(update_index, index, sources, resume=resume, **options)
    done = f"{counted(result.deleted, 'row')} deleted; {result.seconds:.1f} s"
    if result.dry_run:
        done = (
            f"would add {counted(result.rows, 'row')} and delete"
            f" {counted(result.deleted, 'row')}"
        )
    stay_deleted = ""
    if result.stay_deleted:
        stay_deleted = f" + {result.stay_deleted:,} that stay deleted (see --restore)"
    if result.edited:
        rows = counted(result.edited, "unchanged photo")
        done = f"columns of {rows} changed; {done}"
    line = (
        f"{index}: {counted(result.inputs, 'input')} = {result.unchanged:,} unchanged +"
        f" {result.new:,} new + {result.changed:,} changed + {result.duplicates:,}"
        f" duplicates + {result.failed:,} failed{stay_deleted};"
        f" {result.vanished:,} vanished; {done}"
    )
    print_result(result, line)
    if not result.dry_run:
        _note_failures(result, index)


@command("import-arrays")
@click.argument("tokens", type=_FILE)
@click.argument("embeddings", type=_FILE)
@click.argument("rows", type=_FILE, required=False)
@out_index_option
@stored_precisions_option
@option(
    "--encoder",
    default="unknown",
    metavar="NAME",
)
@json_option
def import_arrays(**options: Any) -> None:
    """Make an index from arrays of tokens and embeddings that your own encoder
    computed.

    \b
    TOKENS      .npy file, shape [rows, tokens per row, width]: float32, float16, or
                bfloat16 saved as uint16
    EMBEDDINGS  .npy file, shape [rows, width]: any floating-point type
    ROWS        Parquet file with the column uri and optionally uri_raw, size,
                content_hash, width, height; other columns, such as captions, are kept

    Embeddings are normalised to unit length. Without ROWS, the URI of each row is the
    row id. The index works with 'info', 'verify', 'quantize', 'bench fetch' and the
    Python interface. Text search is not possible, because the index has no model.

    \b
    Examples:
      edje-index import-arrays tokens.npy embeddings.npy \\
        --out pages.edje --precision fp8
      edje-index import-arrays tokens.npy embeddings.npy rows.parquet \\
        --out pages.edje --encoder colpali-v1.3

    Options:
        --encoder: Name and version of your encoder.
    """
    from pipelines.jobs.import_arrays import import_arrays as run_import
    from storage_formats.codecs import codec

    started = time.monotonic()
    options["precisions"] = tuple(dict.fromkeys(options["precisions"]))
    manifest = run_job(run_import, **options)
    spec = manifest.spec
    seconds = time.monotonic() - started
    record_bytes = {
        name: codec(name, spec.block_shape).record_bytes for name in spec.precisions
    }
    value = {
        "rows": spec.rows,
        "shards": spec.shards,
        "block_shape": spec.block_shape,
        "embed_dim": spec.embed_dim,
        "bytes_per_image": record_bytes,
        "ann": manifest.ann["kind"],
        "seconds": seconds,
    }
    m, d = spec.block_shape
    line = (
        f"{options['out']}: {counted(spec.rows, 'row')} of {m} x {d} tokens in"
        f" {counted(spec.shards, 'shard')}, {seconds:.1f} s"
    )
    sizes = [f"{name:6} {size:7,} bytes per row" for name, size in record_bytes.items()]
    print_result(value, line, *sizes)
