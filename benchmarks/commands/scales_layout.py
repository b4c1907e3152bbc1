"""The command `edje-index bench scales-layout`."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.commands.output import show
from pipelines.cli.options import json_option


@click.command("scales-layout")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory for temporary files, on the disk to measure.",
)
@click.option(
    "--rows", type=click.IntRange(min=2), default=100_000, show_default=True, help="Number of rows of each file."
)
@click.option(
    "--blocks", type=click.IntRange(min=1), default=50_000, show_default=True, help="Number of rows to fetch per run."
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Number of runs of each layout."
)
@json_option
def scales_layout_command(folder: Path, rows: int, blocks: int, repeats: int, as_json: bool) -> None:
    """Compare three places for the scales of FP4 records: the record, a padded record, or memory. Linux only.

    Each run fetches random rows with a cold page cache.

    \b
    Example:
      edje-index bench scales-layout --folder /mnt/nvme/bench
    """
    from benchmarks.scales_layout import bench_scales_layout

    report = bench_scales_layout(folder, rows, blocks, repeats, lambda line: click.echo(line, err=True))
    lines = []
    for name, median in report["median"].items():
        million = report["per_million_images"][name]
        lines.append(
            f"{name:7} {median['us_per_block']:6.1f} us per block  {median['gb_per_s']:5.2f} GB/s  "
            f"cpu {median['cpu_us_per_block']:5.1f} us  read {median['bytes_read_per_block']:7,.0f} B  "
            f"per million images: disk {million['disk_gb']:.1f} GB, memory {million['memory_gb']:.2f} GB"
        )
    show(report, as_json, lines)
