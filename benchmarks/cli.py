"""The command group `edje-index bench`."""

from __future__ import annotations

import itertools
from pathlib import Path

import click

from benchmarks.commands.end_to_end import end_to_end_command
from benchmarks.commands.fetch import fetch_command
from benchmarks.commands.output import show
from benchmarks.commands.paper import paper_command
from benchmarks.commands.rerank import rerank_command
from benchmarks.commands.serve import serve_command
from pipelines.cli.options import json_option, shard_size_option, stored_precisions_option
from storage_formats.format.layout import IndexSpec


@click.group()
def bench() -> None:
    """Run a benchmark: fetching, scoring, serving, building, codecs, whole systems, or the tables of the paper.

    Results are medians over several runs. Ratios vary less between machines than seconds.
    """


bench.add_command(fetch_command)
bench.add_command(rerank_command)
bench.add_command(paper_command)
bench.add_command(serve_command)
bench.add_command(end_to_end_command)


@bench.command("make-synthetic")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--rows", type=click.IntRange(min=1), required=True, help="Number of rows.")
@stored_precisions_option
@shard_size_option
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Number of tokens per block.")
@click.option("--width", type=click.IntRange(min=1), default=384, show_default=True, help="Width of a token.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random blocks.")
@json_option
def make_synthetic_command(
    out: Path,
    rows: int,
    precisions: tuple[str, ...],
    shard_size: int,
    tokens: int,
    width: int,
    seed: int,
    as_json: bool,
) -> None:
    """Write an index of random blocks to OUT for benchmarks.

    \b
    Example:
      edje-index bench make-synthetic /tmp/random.edje --rows 100000
    """
    from benchmarks.synthetic import make_synthetic

    spec = IndexSpec(rows, shard_size, (tokens, width), embed_dim=width, precisions=tuple(dict.fromkeys(precisions)))
    make_synthetic(out, spec, seed)
    show({"index": str(out), "rows": rows, "shards": spec.shards}, as_json, [f"{rows} rows in {spec.shards} shards"])


@bench.command("quantize")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Directory for temporary record files.")
@click.option(
    "--blocks",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Number of blocks to encode and decode.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Number of threads of the codecs.  [default: number of CPUs]"
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Number of runs of each codec."
)
@json_option
def quantize_command(folder: Path, blocks: int, threads: int | None, repeats: int, as_json: bool) -> None:
    """Compare the speed of codecs with torch, torchao (if installed) and ml_dtypes.

    Rates are in GB/s of bfloat16 tokens.

    \b
    Example:
      edje-index bench quantize --folder /tmp/bench
    """
    from benchmarks.codecs import bench_codecs

    folder.mkdir(parents=True, exist_ok=True)
    report = bench_codecs(folder, blocks, repeats, threads)
    lines = []
    for task, rates in report["median"].items():
        lines.append(f"{task:14} " + "  ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items()))
        lines.append(" " * 15 + "  ".join(f"{name} {ratio:.2f}x" for name, ratio in report["ratios"][task].items()))
    show(report, as_json, lines)


@bench.command("build")
@click.argument("photos", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), required=True, help="Directory of the model bundle."
)
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Directory for temporary indexes.")
@click.option(
    "--images",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Number of images to index. If PHOTOS has fewer images, images are used several times.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Number of CPU threads of the model."
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Number of runs of each engine and of the comparison loop.",
)
@click.option(
    "--engine",
    "engines",
    metavar="NAME",
    multiple=True,
    default=["inline", "ray"],
    show_default=True,
    help="Execution engine to measure: inline or ray; repeatable.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Data type of the model's matrix products.",
)
@json_option
def build_command(
    photos: Path,
    model: Path,
    folder: Path,
    images: int,
    threads: int,
    repeats: int,
    engines: tuple[str, ...],
    dtype: str,
    as_json: bool,
) -> None:
    """Compare the cost of `edje-index build` with a loop that only decodes and encodes images. Linux only.

    The cost is processor time and memory. A second line shows the seconds per stage, the images per second of the model
    alone, and the share of the processor's limit that the model reaches. A large matrix product measures the limit. In
    a build, "read" and "decode" run beside the model, and "wait" is the time that the model waits for them.

    \b
    Example:
      edje-index bench build ~/photos --model model/ --folder /tmp/bench --images 2000
    """
    from benchmarks.build import BuildBench, bench_build, report_lines

    paths = sorted(path for path in photos.rglob("*.jpg") if path.is_file())
    if not paths:
        raise click.UsageError(f"{photos} contains no .jpg files; choose another directory")
    chosen = list(itertools.islice(itertools.cycle(paths), images))
    report = bench_build(BuildBench(chosen, model, folder, threads, dtype=dtype, repeats=repeats, engines=engines))
    show(report, as_json, report_lines(report))
