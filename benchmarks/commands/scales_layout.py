"""`edje-index bench scales-layout`."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.commands.output import json_option, show


@click.command("scales-layout")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where files are made and removed.")
@click.option("--rows", type=click.IntRange(min=2), default=100_000, show_default=True, help="Rows of a layout.")
@click.option("--blocks", type=click.IntRange(min=1), default=50_000, show_default=True, help="Rows fetched in a run.")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Runs of each layout.")
@json_option
def scales_layout_command(folder: Path, rows: int, blocks: int, repeats: int, as_json: bool) -> None:
    """FP4 with its scales in the record, in memory, or in a padded record: cold random fetches. Linux only.

    \b
    Example:
      edje-index bench scales-layout --folder /mnt/nvme/bench
    """
    from benchmarks.scales_layout import bench_scales_layout

    report = bench_scales_layout(folder, rows, blocks, repeats, lambda line: click.echo(line, err=True))
    lines = []
    for name, found in report["median"].items():
        room = report["per_million_images"][name]
        lines.append(
            f"{name:7} {found['us_per_block']:6.1f} us a block  {found['gb_per_s']:5.2f} GB/s  "
            f"cpu {found['cpu_us_per_block']:5.1f} us  read {found['bytes_read_per_block']:7,.0f} B  "
            f"a million images: disk {room['disk_gb']:.1f} GB, memory {room['memory_gb']:.2f} GB"
        )
    show(report, as_json, lines)
