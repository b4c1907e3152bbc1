"""`edje-index init-model`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.output import json_option, note, print_json


@click.command("init-model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Equal seeds give equal weights."
)
@json_option
def init_model(out: Path, seed: int, as_json: bool) -> None:
    """Make a model bundle of random weights.

    OUT is a new folder. The model has the size of a real one (ViT-S/16, 64 x 384 tokens, a six-layer joint
    encoder), so that every step can be tried at its real cost. It has learned nothing: the order of its
    search results has no meaning.

    \b
    Example:
      edje-index init-model model
    """
    from edje_index.bundles.random_bundle import create_untrained_bundle

    info = create_untrained_bundle(out, seed=seed)
    note("note: the weights of this model are untrained; the order of search results will have no meaning")
    if as_json:
        print_json({"bundle": str(out), "vision": info.vision_name, "fingerprint": info.fingerprint, "trained": False})
    else:
        click.echo(f"{out}: {info.vision_name}, {info.block_shape[0]} x {info.block_shape[1]} tokens, untrained")
