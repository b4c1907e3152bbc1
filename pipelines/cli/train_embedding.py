"""The command `edje-index model train-embedding`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pipelines.cli.options import PATH, images_option, json_option, seed_option
from pipelines.cli.output import note, print_json, print_line
from pipelines.progress.wording import counted
from storage_formats.errors import UsageError


@click.command()
@click.argument("captions", type=PATH)
@images_option
@click.option("--split", metavar="NAME", help="Use only this split of CAPTIONS.")
@click.option(
    "--dev",
    type=PATH,
    help="File of captions of images that are not in CAPTIONS. The epoch with the highest recall on this file is kept.",
)
@click.option("--dev-split", metavar="NAME", help="Use only this split of --dev.")
@click.option("--towers", type=PATH, help="Directory with both towers, written by 'edje-index model fetch-towers'.")
@click.option("--image-tower", metavar="TIMM_NAME:WEIGHTS", help="Vision tower: timm model name and file of weights.")
@click.option("--text-tower", type=PATH, help="Text tower: directory of a Hugging Face BERT model and tokenizer.")
@click.option(
    "--image-size",
    type=click.IntRange(min=14),
    default=224,
    show_default=True,
    help="Width and height of the input images in pixels.",
)
@click.option("--out", required=True, type=PATH, help="Directory of the open_clip model to write.")
@click.option("--cache", type=PATH, help="Directory in which to store image features.  [default: OUT.features]")
@click.option("--embed-dim", default=512, show_default=True, help="Width of the embedding.")
@click.option("--epochs", default=14, show_default=True, help="Number of passes over all captions.")
@click.option("--batch-size", default=512, show_default=True, help="Number of caption-image pairs per step.")
@click.option("--lr", default=1e-3, show_default=True, help="Learning rate of the heads.")
@click.option(
    "--tune-text",
    default=0,
    show_default=True,
    help="Number of last layers of the text tower to train; 0 trains only the heads.",
)
@click.option("--text-lr", default=1e-4, show_default=True, help="Learning rate of the layers that --tune-text trains.")
@click.option(
    "--weight-decay", default=0.5, show_default=True, help="Weight decay; not applied to biases and norm layers."
)
@click.option("--image-dropout", default=0.3, show_default=True, help="Dropout in the image head.")
@click.option("--text-dropout", default=0.3, show_default=True, help="Dropout in the text head.")
@seed_option
@json_option
def train_embedding(captions: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Train contrastive heads on a vision tower and a text tower that were trained separately.

    CAPTIONS is a file of captions in JSONL, JSON (Karpathy or COCO) or Parquet format. The vision tower is frozen. The
    image features are stored in --cache, and later training runs reuse them. The result is an open_clip model. To use
    the model in other commands, give --vision local-dir:OUT.

    \b
    Examples:
      edje-index model train-embedding captions_train.jsonl --dev captions_dev.jsonl --towers towers --out clip
      edje-index model train-embedding coco.json --split train --images coco --image-tower \\
        vit_base_patch14_dinov2:dinov2.safetensors --text-tower minilm --tune-text 2 --out clip
    """
    from edje_index.captions.reading import check_apart, check_image_directory, read_captions
    from edje_index.recipes.contrastive.config import ContrastiveConfig
    from edje_index.recipes.contrastive.embedding_model import EmbeddingRequest
    from edje_index.recipes.contrastive.embedding_model import train_embedding as train
    from pipelines.progress.display import progress_display
    from pipelines.progress.events import StatusMessage, progress_callback

    images = options.pop("images")
    check_image_directory(images)
    data = read_captions(captions, images, options.pop("split"))
    dev_file, dev_split = options.pop("dev"), options.pop("dev_split")
    dev = read_captions(dev_file, images, dev_split) if dev_file else []
    check_apart(data, dev)
    names = ("towers", "image_tower", "text_tower", "image_size")
    sources = _sources(*(options.pop(name) for name in names))
    cache = options.pop("cache") or out.with_name(f"{out.name}.features")
    request = EmbeddingRequest(data, dev, sources, ContrastiveConfig(**options), out, cache)
    with progress_display() as on_event:
        result = train(
            request, progress_callback(on_event), lambda record: on_event(StatusMessage(_describe_epoch(record)))
        )
    if result.unreadable:
        note(f"note: {counted(result.unreadable, 'image')} could not be read and were left out")
    if as_json:
        training = result.training
        print_json(
            {
                "out": str(out),
                "images": result.images,
                "unreadable": result.unreadable,
                "epoch": training.epoch,
                "recall": training.recalls,
                "seconds": round(training.seconds, 1),
            }
        )
    else:
        print_line(f"{out}: trained on {counted(result.images, 'image')}, weights of epoch {result.training.epoch}")


def _sources(towers: Path | None, image_tower: str | None, text_tower: Path | None, image_size: int) -> Any:
    from edje_index.recipes.base_towers.names import IMAGE_TOWER, TEXT_TOWER, TIMM_NAME, WEIGHTS
    from edje_index.recipes.contrastive.config import TowerSources

    if towers is not None:
        image_tower = image_tower or f"{TIMM_NAME}:{towers / IMAGE_TOWER / WEIGHTS}"
        text_tower = text_tower or towers / TEXT_TOWER
    if image_tower is None or text_tower is None:
        raise UsageError("give --towers, or both --image-tower and --text-tower")
    name, _, weights = image_tower.partition(":")
    if not weights:
        raise UsageError(f"--image-tower must be TIMM_NAME:WEIGHTS, got {image_tower!r}")
    return TowerSources(name, Path(weights), text_tower, image_size)


def _describe_epoch(record: Mapping[str, Any]) -> str:
    recalls = ", ".join(f"{name} {value:.1f}" for name, value in record.items() if "R@" in name)
    return f"epoch {record['epoch']}: loss {record['loss']:.3f}{', ' + recalls if recalls else ''}"
