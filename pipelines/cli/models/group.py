"""The command group `edje-index model`."""

from __future__ import annotations

import click

from pipelines.cli.lazy_group import LazyGroup

SECTIONS = {
    "Bundles": {
        "get": "pipelines.cli.models.get:get",
        "show": "pipelines.cli.models.show:show",
        "init": "pipelines.cli.models.init_model:init_model",
        "from-open-clip": "pipelines.cli.models.from_open_clip:from_open_clip",
        "import": "pipelines.cli.models.import_checkpoint:import_checkpoint",
        "pack": "pipelines.cli.models.packing:pack",
        "unpack": "pipelines.cli.models.packing:unpack",
    },
    "Towers": {
        "fetch-towers": "pipelines.cli.models.fetch_towers:fetch_towers",
        "train-embedding": "pipelines.cli.train_embedding:train_embedding",
    },
}


@click.group(cls=LazyGroup, sections=SECTIONS)
def model() -> None:
    """Get, make, inspect and pack model bundles.

    A bundle is a directory with everything that `build` and `search` need: the image and text towers, the adapter,
    the joint encoder and the tokenizers.
    """
