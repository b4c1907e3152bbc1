"""Makes bundles from open_clip models, for search by embedding similarity alone.

A bundle always has an adapter and a joint encoder. In these bundles, the adapter stores one patch per image, and search
does not use the joint encoder.
"""

from __future__ import annotations

from pathlib import Path

import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BundleInfo
from edje_index.bundles.random_tokenizer import untrained_tokenizer
from edje_index.errors import ModelError
from edje_index.models.adapter import STRIDED, AdapterConfig, build_adapter
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.pretrained_clip import LOCAL_DIR, load_clip
from edje_index.models.text_tower import text_tokenizer
from edje_index.models.vision_tower import vision_tower
from edje_index.scoring.weights import DirectionWeights, ScoreWeights

_WIDTH, _WORDS, _POSITIONS = 8, 8, 80


def bundle_of_open_clip(
    vision: str,
    out: str | Path,
    *,
    text_tokenizer_dir: str | Path | None = None,
    untrained: bool = False,
) -> BundleInfo:
    """Make a bundle from an open_clip model. The final score of the bundle is the embedding similarity alone.

    Args:
        vision: open_clip model: ``NAME``, ``NAME:TAG``, ``NAME:/path/to/weights``, ``hf-hub:ORG/REPO`` or
            ``local-dir:DIRECTORY``.
        out: new directory for the bundle.
        text_tokenizer_dir: directory with the tokenizer of the text tower. This argument is needed only for a Hugging
            Face tokenizer that is not in a ``local-dir:`` model and cannot be downloaded.
        untrained: draw random weights instead of loading weights; `vision` must then be a ``NAME``.

    Raises:
        HubUnreachableError: weights or a tokenizer are missing and cannot be downloaded.
        ModelError: the model is unknown, the weights do not fit the model, or `out` exists.
    """
    if Path(out).exists():
        raise ModelError(f"{out} exists already: give another directory, or remove {out}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clip, config = load_clip(vision, untrained=untrained)
        tower = vision_tower(clip.visual)  # type: ignore[arg-type]
        joint = _unused_joint_encoder(tower.embed_dim)
    folder = Path(text_tokenizer_dir) if text_tokenizer_dir is not None else None
    if folder is None and vision.startswith(LOCAL_DIR):
        folder = Path(vision.removeprefix(LOCAL_DIR))
    by_embedding = ScoreWeights(logit=0.0, embedding=1.0)
    bundle = ModelBundle(
        clip=clip,
        clip_config=config,
        text_tokenizer=text_tokenizer(config, folder),
        adapter=build_adapter(AdapterConfig(STRIDED, 1, tower.patch_dim, tower.patch_dim, hidden_dim=0)),
        joint=joint,
        trained=not untrained,
        notes=f"towers of {vision}{', random weights' if untrained else ''}; searches by embedding alone",
        score=DirectionWeights(by_embedding, by_embedding),
    )
    return bundle.save(out)


def _unused_joint_encoder(embed_dim: int) -> JointEncoder:
    tokenizer = untrained_tokenizer(_WORDS)
    config = {
        "hidden_size": _WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": _WIDTH,
        "max_position_embeddings": _POSITIONS,
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
    }
    return JointEncoder(bert_config(config), tokenizer, embed_dim)
