"""The commands `edje-index model pack` and `edje-index model unpack`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.models.bundle_report import report_bundle
from pipelines.cli.options import PATH, json_option
from pipelines.cli.output import print_json, print_line

_towers_option = click.option(
    "--towers", type=PATH, required=True, help="Directory of the base towers, written by 'model fetch-towers'."
)


@click.command()
@click.argument("bundle", type=PATH)
@click.argument("out", type=PATH)
@_towers_option
@click.option(
    "--new-tensors",
    "--fresh",
    "new_tensors",
    type=click.Choice(["fp16", "int8"]),
    default="fp16",
    show_default=True,
    help="Precision of large tensors that the base towers do not contain.",
)
@click.option("--max-mb", default=25.0, show_default=True, help="Maximum size of OUT in megabytes.")
@json_option
def pack(bundle: Path, out: Path, towers: Path, new_tensors: str, max_mb: float, as_json: bool) -> None:
    """Compress BUNDLE into the new directory OUT, small enough for a Git repository.

    OUT contains only the differences from the base towers. Packing rounds the weights. To measure the effect, evaluate
    the bundle that 'edje-index model unpack' restores.

    \b
    Example:
      edje-index model pack trained models/flickr8k --towers towers
    """
    from edje_index.recipes.packing.pack import pack_model

    result = pack_model(bundle, towers, out, new_tensors=new_tensors, max_bytes=int(max_mb * 1e6))
    if as_json:
        packings = {name: {"tensors": count, "bytes": size} for name, (count, size) in result.packings.items()}
        print_json({"out": str(out), "bytes": result.size, "fingerprint": result.fingerprint, "packings": packings})
        return
    for name, (count, size) in result.packings.items():
        print_line(f"{name:>8}: {count:4d} tensors, {size / 1e6:6.2f} MB")
    print_line(f"{out}: {result.size / 1e6:.2f} MB, fingerprint after unpacking {result.fingerprint[:16]}")


@click.command()
@click.argument("packed", type=PATH)
@click.argument("out", type=PATH)
@_towers_option
@json_option
def unpack(packed: Path, out: Path, towers: Path, as_json: bool) -> None:
    """Write the bundle of a packed model to the new directory OUT.

    PACKED is a directory that 'edje-index model pack' wrote. The restored bundle is the same, byte for byte, on every
    machine.

    \b
    Example:
      edje-index model unpack models/flickr8k model --towers towers
    """
    from edje_index.recipes.packing.unpack import unpack_model

    report_bundle(unpack_model(packed, towers, out), as_json=as_json)
