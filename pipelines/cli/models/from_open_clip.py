"""The command `edje-index model from-open-clip`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.models.bundle_report import report_bundle
from pipelines.cli.options import json_option, new_bundle_option, text_tokenizer_option
from pipelines.cli.output import note


@click.command()
@click.argument("tower", metavar="MODEL[:PRETRAINED]")
@new_bundle_option
@text_tokenizer_option
@click.option("--random", "untrained", is_flag=True, help="Use random weights, so that nothing is downloaded.")
@json_option
def from_open_clip(tower: str, out: Path, text_tokenizer: Path | None, untrained: bool, as_json: bool) -> None:
    """Make a bundle from an open_clip model, for search by embedding without re-ranking.

    MODEL is NAME, hf-hub:ORG/REPO or local-dir:DIR. PRETRAINED is an open_clip tag or a file of weights.

    Use the bundle to measure the recall of embeddings with 'eval', or to mine hard negatives with 'train --set
    inputs.miner=BUNDLE'.

    \b
    Examples:
      edje-index model from-open-clip ViT-L-16-SigLIP2-384:webli --out siglip2
      edje-index model from-open-clip ViT-B-16:/weights/vit.safetensors --out clip
    """
    from edje_index.bundles.open_clip_bundle import bundle_of_open_clip

    info = bundle_of_open_clip(tower, out, text_tokenizer_dir=text_tokenizer, untrained=untrained)
    if untrained:
        note("note: the weights of this model are untrained; the order of search results will have no meaning")
    report_bundle(info, as_json=as_json)
