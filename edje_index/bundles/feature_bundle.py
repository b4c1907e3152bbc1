"""Makes bundles that store the features of a frozen vision tower, to train on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BundleInfo
from edje_index.models.adapter import AdapterConfig, build_adapter
from edje_index.scoring.weights import DirectionWeights


def write_feature_bundle(
    towers: str | Path,
    out: str | Path,
    kind: Literal["patches", "strided", "clustered", "pruned"] = "patches",
    tokens: int | None = None,
) -> BundleInfo:
    """Write a bundle with the towers of another bundle and an adapter without weights.
    An index that the new bundle builds is the data set of a training run.

    Args:
        towers: directory of the bundle with the towers.
        out: directory to create.
        kind: what to store. "patches" stores the features of all patches, on which
            compressed and local adapters are trained. "strided", "clustered" and
            "pruned" store reduced patches, on which adapters of the same kind are
            trained.
        tokens: number of reduced patches per image.

    Raises:
        ModelError: `towers` cannot be read, the arguments do not fit each other, or
            `out` exists.

    Examples:
        >>> from edje_index import write_feature_bundle
        >>> write_feature_bundle("model", "patches").block_shape
        (16, 32)
    """
    bundle = ModelBundle.load(towers)
    width = bundle.vision.patch_dim
    count = tokens or bundle.vision.num_patches
    features = replace(
        bundle,
        adapter=build_adapter(AdapterConfig(kind, count, width, width, hidden_dim=0)),
        trained=True,
        notes="stores features to train on; it cannot re-rank",
        score=DirectionWeights(),
        pooled=None,
        logit_range=None,
        offset=None,
        info=None,
    )
    return features.save(out)
