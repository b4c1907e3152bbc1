"""`edje-index import-checkpoint`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.output import json_option, print_json

_FOLDER = click.Path(path_type=Path)


@click.command("import-checkpoint")
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--vision", required=True, help="The tower: NAME, NAME:TAG, NAME:WEIGHTS, hf-hub:ORG/REPO or local-dir:DIR."
)
@click.option("--out", required=True, type=_FOLDER, help="Folder of the new bundle.")
@click.option("--pretrained", help="Tag or file of the tower's weights, where --vision does not say.")
@click.option(
    "--tokenizer",
    type=_FOLDER,
    help="Joint encoder's tokenizer and config.json.  [default: tokenizer/ beside CHECKPOINT]",
)
@click.option("--text-tokenizer", type=_FOLDER, help="Text tower's tokenizer, where it cannot be downloaded.")
@json_option
def import_checkpoint(
    checkpoint: Path,
    vision: str,
    out: Path,
    pretrained: str | None,
    tokenizer: Path | None,
    text_tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Make a model bundle of a checkpoint.

    CHECKPOINT is what the published training code writes; the tower that it was trained with comes from open_clip.

    \b
    Examples:
      edje-index import-checkpoint edje.pth --vision ViT-B-16-SigLIP2-384:webli --out model
      edje-index import-checkpoint edje.pth --vision ViT-B-16:/weights/vit.safetensors --tokenizer minilm --out model
    """
    from edje_index.bundles.import_checkpoint import import_checkpoint as make_bundle

    info = make_bundle(
        checkpoint, vision, out, pretrained=pretrained, tokenizer_dir=tokenizer, text_tokenizer_dir=text_tokenizer
    )
    if as_json:
        print_json({"bundle": str(out), "vision": info.vision_name, "fingerprint": info.fingerprint, "trained": True})
    else:
        click.echo(f"{out}: {info.vision_name}, {info.block_shape[0]} x {info.block_shape[1]} tokens")
