"""The command `edje-index model init`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.models.bundle_report import report_bundle
from pipelines.cli.options import PATH, json_option
from pipelines.cli.output import note


@click.command()
@click.argument("out", type=PATH)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Random seed of the weights.",
)
@json_option
def init_model(out: Path, seed: int, as_json: bool) -> None:
    """Write a model bundle with random weights to the new directory OUT.

    The model has the size of a trained model, so commands take as long as with a trained model. The order of search
    results is random.

    \b
    Example:
      edje-index model init model
    """
    from edje_index.bundles.random_bundle import create_untrained_bundle

    info = create_untrained_bundle(out, seed=seed)
    note("note: the weights of this model are untrained; the order of search results will have no meaning")
    report_bundle(info, as_json=as_json)
