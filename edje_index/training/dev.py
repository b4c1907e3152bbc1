"""Scores pools of dev captions and dev images with a bundle: recall during
training, and the fit of the final score.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.evaluation.pool_scores import score_pairs
from edje_index.evaluation.protocol import EvaluationSet, split_set
from edje_index.progress import OnProgress
from edje_index.scoring.weights import (
    DIRECTIONS,
    EMBEDDING,
    JOINT_PARTS,
)
from edje_index.training.captions import CaptionSet, TrainingData
from edje_index.training.features import Features
from edje_index.training.fit_weights import (
    DevPools,
)
from edje_index.training.start import trained_part
from storage_formats.arrays import Floats
from storage_formats.reading.embeddings import read_embeddings

_ADAPTER_BATCH = 32
_ACTIVITY = "scoring the dev captions, pairs"


@dataclass(frozen=True)
class DevSet:
    """Dev images and their captions, with embeddings. They are not trained on.

    Attributes:
        queries: queries and candidates, with row ids of the feature index.
        images: embeddings of the images, float32 [r, e].
        captions: embeddings of the captions, float32 [c, e].
    """

    queries: EvaluationSet
    images: Floats
    captions: Floats

    @classmethod
    def open(
        cls, captions: CaptionSet, data: Path, features: Features, most: int
    ) -> DevSet:
        """Open the dev captions, with at most `most` random queries per direction.
        `data` is the folder of their `TrainingData`.
        """
        queries = split_set(captions.captions, captions.rows).subsampled(most, seed=0)
        embeddings = np.asarray(TrainingData.open(data).text_embeddings)
        return cls(queries, read_embeddings(features.index, queries.rows), embeddings)


@torch.inference_mode()
def dev_pools(
    bundle: ModelBundle,
    dev: DevSet,
    features: Features,
    size: int,
    names: tuple[str, ...] = JOINT_PARTS,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> dict[str, DevPools]:
    """Score pools that contain the `size` candidates most similar to each query. Return
    the pools by direction.

    The modules of `bundle` must be in evaluation mode. An exception raised by
    `on_progress` stops this function.

    A part of the score in `names` that `bundle` lacks is left out. An image that cannot
    be read any more counts as a blank image.
    """
    queries = dev.queries
    nearest = {
        direction: queries.pools(direction, dev.images, dev.captions, size)
        for direction in DIRECTIONS
    }
    pairs = [queries.pairs(direction, pools) for direction, pools in nearest.items()]
    # each image is read once
    shown = np.unique(np.concatenate([rows.ravel() for _, rows in pairs]))
    adapter = trained_part(bundle.adapter)
    blocks = []
    for first in range(0, len(shown), _ADAPTER_BATCH):
        values, _ = features.fetch(shown[first : first + _ADAPTER_BATCH])
        # as an index stores tokens
        blocks.append(adapter(values.to(bundle.joint.device).float()).bfloat16().cpu())
    tokens = torch.cat(blocks)
    scorer = bundle.scorer
    parts = score_pairs(
        scorer,
        [name for name in names if name in scorer.part_names],
        queries.captions,
        pairs,
        lambda rows: tokens[torch.from_numpy(np.searchsorted(shown, rows))],
        on_progress,
        _ACTIVITY,
    )
    return {
        direction: DevPools(
            parts={EMBEDDING: pools.similarities, **values},
            right=pools.relevant,
            images=queries.images_of_queries(direction),
        )
        for (direction, pools), values in zip(nearest.items(), parts, strict=True)
    }
