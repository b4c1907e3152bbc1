"""The command `edje-index bench quantize-index`."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.commands.output import show
from pipelines.cli.options import engine_option, json_option


@click.command("quantize-index")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory for temporary indexes, on the disk to measure.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=102_400,
    show_default=True,
    help="Number of rows; each has one block of 49,152 bytes. The default takes 5 GB of disk space.",
)
@click.option("--to", default="fp8", show_default=True, metavar="NAME", help="Precision to convert to.")
@engine_option("inline")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of worker processes, with --engine ray.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of runs of `quantize` and of `cp`.",
)
@json_option
def quantize_index_command(
    folder: Path, rows: int, to: str, engine: str, workers: int, repeats: int, as_json: bool
) -> None:
    """Compare `edje-index quantize` of a BF16 index with `cp` of the same token files. Linux only.

    Each run starts with a cold page cache and ends with fsync. Rates count the bytes that are read plus the bytes that
    are written. The results 'with start' include process start-up.

    \b
    Example:
      edje-index bench quantize-index --folder /mnt/nvme/bench
    """
    from benchmarks.quantize_index import QuantizeBench, bench_quantize_index

    folder.mkdir(parents=True, exist_ok=True)
    bench = QuantizeBench(folder, rows, to, engine, workers, repeats)
    report = bench_quantize_index(bench, lambda line: click.echo(line, err=True))
    lines = [f"{name:24} {rate:5.2f} GB/s read + written" for name, rate in report["median_gb_per_s"].items()]
    lines += [f"{name:24} {ratio:5.2f}x, target {report['target']}x" for name, ratio in report["ratios"].items()]
    show(report, as_json, lines)
