"""Converts the final score in version 1 of ``bundle.json`` to version 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edje_index.scoring.weights import DirectionWeights, HubnessSimilarity, ScoreWeights

_RENAMED_SIZES = {"pooled": "pooled_similarity", "bank": "hubness_bank"}


def migrate_version_1(joint: Mapping[str, Any]) -> tuple[dict[str, Any], DirectionWeights]:
    """Split version 1's ``joint`` into version 2's ``joint`` and ``score``.

    Version 1 keeps the weights of text-to-image search in ``embedding_weight``, ``late_weight``, ``pooled_weight``,
    ``prior_weight`` and ``prior_temperature``, each left out if it has no effect, and those of image-to-text search in
    ``caption_weights``, which is left out if they are the same.

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
    """The weights of one direction. Version 1 ignores the weight of a part that the bundle does not hold."""
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
