"""`edje-index carry-model` and `edje-index unpack-model`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.output import json_option, print_json

_FOLDER = click.Path(path_type=Path)
_towers_option = click.option("--towers", type=_FOLDER, required=True, help="Folder of fetch-towers.")


@click.command("carry-model")
@click.argument("bundle", type=_FOLDER)
@click.argument("out", type=_FOLDER)
@_towers_option
@click.option(
    "--fresh",
    type=click.Choice(["fp16", "int8"]),
    default="fp16",
    show_default=True,
    help="How large tensors are packed that no tower has.",
)
@click.option("--max-mb", default=25.0, show_default=True, help="Refuse a larger folder.")
@json_option
def carry_model(bundle: Path, out: Path, towers: Path, fresh: str, max_mb: float, as_json: bool) -> None:
    """Pack a trained bundle into a folder small enough for a repository.

    OUT is a new folder that holds only what differs from the base towers: tuned layers as 8-bit differences, new
    layers as float16 or int8. Packing rounds: evaluate the bundle that unpack-model makes of it.

    \b
    Example:
      edje-index carry-model trained models/flickr8k --towers towers
    """
    from edje_index.recipes.packing.pack import pack_model as pack

    result = pack(bundle, towers, out, new_tensors=fresh, max_bytes=int(max_mb * 1e6))
    if as_json:
        packings = {name: {"tensors": count, "bytes": size} for name, (count, size) in result.packings.items()}
        record = {"out": str(out), "bytes": result.size, "fingerprint": result.fingerprint, "packings": packings}
        print_json(record)
        return
    for name, (count, size) in result.packings.items():
        click.echo(f"{name:>8}: {count:4d} tensors, {size / 1e6:6.2f} MB")
    click.echo(f"{out}: {result.size / 1e6:.2f} MB, assembled fingerprint {result.fingerprint[:16]}")


@click.command("unpack-model")
@click.argument("carried", type=_FOLDER)
@click.argument("out", type=_FOLDER)
@_towers_option
@json_option
def unpack_model(carried: Path, out: Path, towers: Path, as_json: bool) -> None:
    """Make the bundle of a carried model.

    CARRIED is what carry-model wrote, OUT a new folder. The same towers give the same bytes everywhere; anything else
    is refused.

    \b
    Example:
      edje-index unpack-model models/flickr8k model --towers towers
    """
    from edje_index.recipes.packing.unpack import unpack_model as unpack

    info = unpack(carried, towers, out)
    if as_json:
        print_json(
            {"bundle": str(out), "vision": info.vision_name, "fingerprint": info.fingerprint, "trained": info.trained}
        )
    else:
        click.echo(f"{out}: {info.vision_name}, {info.block_shape[0]} x {info.block_shape[1]} tokens")
