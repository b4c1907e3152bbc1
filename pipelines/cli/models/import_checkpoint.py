"""The command `edje-index model import`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.models.bundle_report import report_bundle
from pipelines.cli.options import PATH, json_option, new_bundle_option, text_tokenizer_option


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--vision",
    metavar="TOWER",
    help="Vision tower: NAME, NAME:TAG, NAME:WEIGHTS, hf-hub:ORG/REPO or local-dir:DIR.  [default: from CHECKPOINT]",
)
@new_bundle_option
@click.option("--pretrained", metavar="TAG", help="Tag or file of the tower's weights, if --vision names no weights.")
@click.option(
    "--tokenizer",
    type=PATH,
    help="Directory with the joint encoder's tokenizer and config.json.  [default: tokenizer/ next to CHECKPOINT]",
)
@text_tokenizer_option
@json_option
def import_checkpoint(
    checkpoint: Path,
    vision: str | None,
    out: Path,
    pretrained: str | None,
    tokenizer: Path | None,
    text_tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Convert a trained checkpoint into a bundle.

    CHECKPOINT is a file that the published EDJE training code wrote. The vision tower is loaded from open_clip. If
    CHECKPOINT contains a vision tower too, the weights of both towers must be equal.

    \b
    Examples:
      edje-index model import edje.pth --vision ViT-B-16-SigLIP2-384:webli --out model
      edje-index model import edje.pth --vision ViT-B-16:/weights/vit.safetensors --tokenizer minilm --out model
    """
    from edje_index.bundles.import_checkpoint import import_checkpoint as write_bundle

    info = write_bundle(
        checkpoint, vision, out, pretrained=pretrained, tokenizer_dir=tokenizer, text_tokenizer_dir=text_tokenizer
    )
    report_bundle(info, as_json=as_json)
