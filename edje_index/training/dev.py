"""Scores pools of dev captions and dev images with a bundle: recall during
training, and the fit of the final score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.bundles.bundle import ModelBundle
from edje_index.progress import OnProgress
from edje_index.scoring.weights import (
    EMBEDDING,
    IMAGE_TO_TEXT,
    JOINT_PARTS,
    LOGIT,
    TEXT_TO_IMAGE,
    ScoreWeights,
)
from edje_index.training.captions import CaptionSet, TrainingData
from edje_index.training.config import FittingConfig
from edje_index.training.features import Features
from edje_index.training.fit_weights import (
    DevPools,
    WeightChoice,
    choose_weights,
)
from edje_index.training.random_streams import DEV, stream
from edje_index.training.start import trained_part
from storage_formats.reading.embeddings import read_embeddings

_ADAPTER_BATCH = 32
_ACTIVITY = "choosing the weights of the final score on the dev captions, queries"


@dataclass(frozen=True)
class DevSet:
    """n dev images and c dev captions with embeddings. They are not trained on.

    Attributes:
        rows: row ids of the images in the feature index, int64 [n].
        caption_images: index of the image of each caption, int64 [c].
        image_embeddings: embeddings of the images, float32 [n, e].
        text_embeddings: embeddings of the captions, float32 [c, e].
    """

    rows: NDArray[np.int64]
    captions: list[str]
    caption_images: NDArray[np.int64]
    image_embeddings: NDArray[np.float32]
    text_embeddings: NDArray[np.float32]

    @classmethod
    def open(cls, captions: CaptionSet, data: Path, features: Features) -> DevSet:
        """Open the dev captions. `data` is the folder of their `TrainingData`."""
        caption_images = np.repeat(
            np.arange(len(captions.rows)), [len(group) for group in captions.captions]
        )
        image_embeddings = read_embeddings(features.index, captions.rows)
        text_embeddings = np.asarray(TrainingData.open(data).text_embeddings)
        return cls(
            captions.rows,
            captions.texts(),
            caption_images,
            image_embeddings,
            text_embeddings,
        )


def choose_dev_weights(
    bundle: ModelBundle,
    dev: DevSet,
    features: Features,
    config: FittingConfig,
    on_progress: OnProgress = lambda activity, done, total: None,
    start: ModelBundle | None = None,
) -> dict[str, WeightChoice]:
    """Fit the weights of the final score. Return the weights, and the recall with these
    weights, by direction. `start` is a bundle with the same towers to compare with.

    The modules of `bundle` must be in evaluation mode. `on_progress` is called before
    every query and the fit of each direction. An exception raised by `on_progress`
    stops this function.
    """
    queries = _queries(dev, config)
    before = 0
    total = sum(map(len, queries.values()))
    choices = {}
    for direction, positions in queries.items():

        def report(done: int, before: int = before) -> None:
            on_progress(_ACTIVITY, before + done, total)

        pools, *others = [
            _pools(
                each,
                dev,
                features,
                direction,
                positions,
                config.dev_pool,
                JOINT_PARTS,
                report,
            )
            for each in (bundle, start)
            if each is not None
        ]
        report(len(positions))
        choices[direction] = choose_weights(pools, *others)
        before += len(positions)
    return choices


def dev_recalls(
    bundle: ModelBundle, dev: DevSet, features: Features, config: FittingConfig
) -> dict[str, float]:
    """Return R@1 with the logit alone, between 0 and 1, by direction.

    The queries and pools are the same as in :func:`choose_dev_weights`.
    """
    recalls = {}
    for direction, positions in _queries(dev, config).items():
        pools = _pools(
            bundle,
            dev,
            features,
            direction,
            positions,
            config.dev_pool,
            (LOGIT,),
            lambda query: None,
        )
        recalls[direction] = float(pools.hits(ScoreWeights()).mean())
    return recalls


def _queries(dev: DevSet, config: FittingConfig) -> dict[str, NDArray[np.int64]]:
    """Return the query numbers by direction: numbers of captions for t2i, numbers
    of images for i2t.
    """
    return {
        TEXT_TO_IMAGE: np.sort(
            stream(0, DEV, 0).permutation(len(dev.captions))[: config.dev_captions]
        ),
        IMAGE_TO_TEXT: np.sort(
            stream(0, DEV, 1).permutation(len(dev.rows))[: config.dev_captions]
        ),
    }


@torch.inference_mode()
def _pools(
    bundle: ModelBundle,
    dev: DevSet,
    features: Features,
    direction: str,
    queries: NDArray[np.int64],
    size: int,
    names: tuple[str, ...],
    on_query: Callable[[int], None],
) -> DevPools:
    """Score pools that contain the `size` candidates most similar to each query in one
    direction.

    A part of the score in `names` that `bundle` lacks is left out. An image that cannot
    be read any more counts as a blank image.
    """
    text_queries = direction == TEXT_TO_IMAGE
    embeddings = (dev.text_embeddings, dev.image_embeddings)
    query_embeddings, candidate_embeddings = (
        embeddings if text_queries else embeddings[::-1]
    )
    similarities = query_embeddings[queries] @ candidate_embeddings.T
    near = np.argsort(-similarities, axis=1, kind="stable")[:, :size]
    repeated = np.repeat(queries[:, None], near.shape[1], axis=1)
    captions, images = (repeated, near) if text_queries else (near, repeated)
    # each image is read once
    shown = np.unique(images)
    adapter = trained_part(bundle.adapter)
    blocks = []
    for start in range(0, len(shown), _ADAPTER_BATCH):
        values, _ = features.fetch(dev.rows[shown[start : start + _ADAPTER_BATCH]])
        # as an index stores tokens
        blocks.append(adapter(values.to(bundle.joint.device).float()).bfloat16().cpu())
    scorer = bundle.scorer
    images_shown = scorer.images(torch.cat(blocks))
    joint_parts = [name for name in names if name in scorer.part_names]
    scores: list[dict[str, NDArray[np.float32]]] = []
    for query, (caption_row, image_row) in enumerate(
        zip(captions, images, strict=True)
    ):
        on_query(query)
        scores.append(
            scorer.parts(
                joint_parts,
                [dev.captions[position] for position in caption_row],
                images_shown.at(torch.from_numpy(np.searchsorted(shown, image_row))),
            )
        )
    return DevPools(
        parts={
            EMBEDDING: np.take_along_axis(similarities, near, axis=1),
            **{name: np.stack([row[name] for row in scores]) for name in joint_parts},
        },
        right=dev.caption_images[captions] == images,
        images=dev.rows[dev.caption_images[queries] if text_queries else queries],
    )
