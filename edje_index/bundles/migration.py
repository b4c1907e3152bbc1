"""Converts the score settings in ``bundle.json`` from format version 1 to version 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edje_index.scoring.weights import DirectionWeights, HubnessSimilarity, ScoreWeights

_RENAMED_SIZES = {"pooled": "pooled_similarity", "bank": "hubness_bank"}


def migrate_version_1(joint: Mapping[str, Any]) -> tuple[dict[str, Any], DirectionWeights]:
    """Convert the entry ``joint`` of version 1 to the entries ``joint`` and ``score`` of version 2.

    In version 1, ``joint`` also contains the weights of the final score. The entry ``caption_weights`` contains the
    weights for image-to-text search. The weight of a part that the bundle lacks is left out.

    Raises:
        KeyError, TypeError, ValueError: ``joint`` is damaged.
    """
    sizes = {new: dict(joint[old]) for old, new in _RENAMED_SIZES.items() if old in joint}
    images = {name: joint.get(f"{name}_weight", 0.0) for name in ("late", "pooled", "prior")}
    images["similarity"] = joint.get("embedding_weight", 0.0)
    images["temperature"] = joint.get("prior_temperature", 1.0)
    captions = joint.get("caption_weights", images)
    score = DirectionWeights(t2i=_weights(images, sizes), i2t=_weights(captions, sizes))
    return {"text_embed_dim": joint["text_embed_dim"], **sizes}, score


def _weights(named: Mapping[str, Any], sizes: Mapping[str, Any]) -> ScoreWeights:
    """Convert the weights of one direction."""
    embedding, late, pooled, prior, temperature = (
        float(named[name]) for name in ("similarity", "late", "pooled", "prior", "temperature")
    )
    return ScoreWeights(
        late=late,
        pooled=pooled if "pooled_similarity" in sizes else 0.0,
        embedding=embedding,
        hubness=prior if "hubness_bank" in sizes else 0.0,
        hubness_similarity=HubnessSimilarity(embedding, pooled, temperature),
    )
