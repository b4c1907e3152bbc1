"""Scores pools of dev captions and dev images with a trained bundle, to fit the weights of the final score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.bundles.bundle import ModelBundle
from edje_index.progress import OnProgress
from edje_index.scoring.parts import Pairs
from edje_index.scoring.weights import (
    EMBEDDING,
    IMAGE_TO_TEXT,
    JOINT_PARTS,
    LATE,
    LOGIT,
    POOLED,
    TEXT_TO_IMAGE,
    ScoreWeights,
)
from edje_index.training.config import FittingConfig
from edje_index.training.data.dataset import DevCaptions
from edje_index.training.data.features import Features
from edje_index.training.data.sampling import DEV, stream
from edje_index.training.data.unreadable import nothing_readable
from edje_index.training.fitting.fit_weights import (
    DevPools,
    HubnessProducts,
    Scores,
    WeightChoice,
    choose_weights,
)
from edje_index.training.model.trained_part import trained_part

_Result = TypeVar("_Result")

_ADAPTER_BATCH = 32
_ACTIVITY = "choosing the weights of the final score on the dev captions, queries"


@dataclass(frozen=True)
class DevSet:
    """n dev images and c dev captions with embeddings. They are not trained on.

    Attributes:
        rows: row ids of the images in the feature index, int64 [n].
        captions: text of each caption.
        caption_images: index of the image of each caption, int64 [c].
        image_embeddings: embeddings of the images, float32 [n, e].
        text_embeddings: embeddings of the captions, float32 [c, e].
    """

    rows: NDArray[np.int64]
    captions: list[str]
    caption_images: NDArray[np.int64]
    image_embeddings: NDArray[np.float32]
    text_embeddings: NDArray[np.float32]

    def without(self, images: NDArray[np.int64]) -> DevSet:
        """Return this set without the images with the indices `images`, and without their captions.

        Raises:
            EdjeError: no image is left.
        """
        is_kept = ~np.isin(np.arange(len(self.rows)), images)
        if not is_kept.any():
            raise nothing_readable()
        captions = np.flatnonzero(is_kept[self.caption_images])
        return DevSet(
            rows=self.rows[is_kept],
            captions=[self.captions[caption] for caption in captions],
            caption_images=(np.cumsum(is_kept) - 1)[self.caption_images[captions]],
            image_embeddings=self.image_embeddings[is_kept],
            text_embeddings=self.text_embeddings[captions],
        )


class _UnreadableImages(Exception):
    """Images of a dev set cannot be read.

    Args:
        images: indices of these images in the dev set.
    """

    def __init__(self, images: NDArray[np.int64]) -> None:
        super().__init__(images)
        self.images = images


def _with_readable(dev: DevSet, score: Callable[[DevSet], _Result]) -> _Result:
    """Return `score(dev)`. If images cannot be read, they are left out, and the scoring starts again."""
    while True:
        try:
            return score(dev)
        except _UnreadableImages as error:
            dev = dev.without(error.images)


def make_dev_set(dev: DevCaptions, text_embeddings: NDArray[np.float32]) -> DevSet:
    """Convert `dev` to a `DevSet`. `text_embeddings` are the embeddings of the captions, float32 [c, e]."""
    items = dev.captions
    caption_images = np.repeat(np.arange(len(items.rows)), [len(group) for group in items.captions])
    return DevSet(items.rows, items.texts(), caption_images, dev.image_embeddings, text_embeddings)


def choose_dev_weights(
    bundle: ModelBundle,
    dev: DevSet,
    features: Features,
    config: FittingConfig,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> dict[str, WeightChoice]:
    """Fit the weights that are None in `config`. Return all weights, and the recall with these weights, by direction.

    Images that cannot be read are left out, with their captions.
    The modules of `bundle` must be in evaluation mode. `on_progress` is called before every query and every fit. An
    exception raised by `on_progress` stops this function.
    """
    return _with_readable(dev, lambda readable: _choose(bundle, readable, features, config, on_progress))


def _choose(
    bundle: ModelBundle, dev: DevSet, features: Features, config: FittingConfig, on_progress: OnProgress
) -> dict[str, WeightChoice]:
    queries = _queries(dev, config)
    settings = {EMBEDDING: config.embedding_weight, LATE: config.late_weight, POOLED: config.pooled_weight}
    before, total = 0, sum(map(len, queries.values()))
    choices = {}
    for direction, positions in queries.items():
        scorer = _DevScorer(bundle, dev, features, direction)
        report = partial(_report, on_progress, before, total)
        pools = scorer.pools(positions, config.dev_pool, report)
        given = {part: weight for part, weight in settings.items() if part in pools.parts}
        choices[direction] = choose_weights(pools, given, partial(report, len(positions)))
        before += len(positions)
    return choices


def dev_recalls(bundle: ModelBundle, dev: DevSet, features: Features, config: FittingConfig) -> dict[str, float]:
    """Return R@1 with the logit alone, between 0 and 1, by direction.

    The queries and pools are the same as in :func:`choose_dev_weights`.
    """
    return _with_readable(dev, lambda readable: _recalls(bundle, readable, features, config))


def _recalls(bundle: ModelBundle, dev: DevSet, features: Features, config: FittingConfig) -> dict[str, float]:
    recalls = {}
    for direction, positions in _queries(dev, config).items():
        scorer = _DevScorer(bundle, dev, features, direction, parts=(LOGIT,))
        pools = scorer.pools(positions, config.dev_pool, lambda query: None)
        recalls[direction] = float(pools.hits(ScoreWeights()).mean())
    return recalls


def _queries(dev: DevSet, config: FittingConfig) -> dict[str, NDArray[np.int64]]:
    """Return the query numbers by direction: numbers of captions for t2i, numbers of images for i2t."""
    return {
        TEXT_TO_IMAGE: np.sort(stream(0, DEV, 0).permutation(len(dev.captions))[: config.dev_captions]),
        IMAGE_TO_TEXT: np.sort(stream(0, DEV, 1).permutation(len(dev.rows))[: config.dev_captions]),
    }


def _report(on_progress: OnProgress, before: int, total: int, done: int) -> None:
    on_progress(_ACTIVITY, before + done, total)


@dataclass(frozen=True)
class _DevScorer:
    """Scores pools of dev queries in one direction. A part of the score that `bundle` lacks is left out."""

    bundle: ModelBundle
    dev: DevSet
    features: Features
    direction: str
    parts: tuple[str, ...] = JOINT_PARTS

    def pools(self, queries: NDArray[np.int64], size: int, on_query: Callable[[int], None]) -> DevPools:
        """Score pools that contain the `size` candidates most similar to each query."""
        dev, text_queries = self.dev, self.direction == TEXT_TO_IMAGE
        embeddings = (dev.text_embeddings, dev.image_embeddings)
        query_embeddings, candidate_embeddings = embeddings if text_queries else embeddings[::-1]
        similarities = query_embeddings[queries] @ candidate_embeddings.T
        near = np.argsort(-similarities, axis=1, kind="stable")[:, :size]
        repeated = np.repeat(queries[:, None], near.shape[1], axis=1)
        captions, images = (repeated, near) if text_queries else (near, repeated)
        tokens = _DevTokens.of(self.bundle, dev, self.features, images)
        joint_parts = self._joint_parts(captions, images, tokens, on_query)
        return DevPools(
            parts={EMBEDDING: np.take_along_axis(similarities, near, axis=1), **joint_parts},
            right=dev.caption_images[captions] == images,
            images=dev.rows[dev.caption_images[queries] if text_queries else queries],
            hubness=self._hubness_products(near, tokens),
        )

    def _joint_parts(
        self,
        captions: NDArray[np.int64],
        images: NDArray[np.int64],
        tokens: _DevTokens,
        on_query: Callable[[int], None],
    ) -> dict[str, Scores]:
        """Compute the parts of the score that read tokens. Return float32 [q, p] by name of the part."""
        available = self.bundle.parts(self.direction, ScoreWeights())
        parts = {name: available[name] for name in self.parts if name in available}
        scores: dict[str, list[NDArray[np.float32]]] = {name: [] for name in parts}
        for query, (caption_row, image_row) in enumerate(zip(captions, images, strict=True)):
            on_query(query)
            pairs = Pairs([self.dev.captions[position] for position in caption_row], tokens.at(image_row))
            for name, part in parts.items():
                scores[name].append(part.of(pairs))
        return {name: np.stack(rows) for name, rows in scores.items()}

    @torch.inference_mode()
    def _hubness_products(self, candidates: NDArray[np.int64], tokens: _DevTokens) -> HubnessProducts | None:
        bank, vectors_of = self.bundle.hubness_bank, self.bundle.pooled_vectors
        if bank is None:
            return None
        distinct, which = np.unique(candidates, return_inverse=True)
        if self.direction == TEXT_TO_IMAGE:
            vectors, embeddings = vectors_of.of_images(tokens.at(distinct)), self.dev.image_embeddings
        else:
            texts = [self.dev.captions[position] for position in distinct]
            vectors, embeddings = vectors_of.of_captions(texts), self.dev.text_embeddings
        candidate_embeddings = torch.from_numpy(embeddings[distinct]).to(vectors.device)
        embedding_products, pooled_products = bank.products(candidate_embeddings, vectors, self.direction)
        return HubnessProducts(
            embedding=embedding_products.cpu(),
            pooled=pooled_products.cpu(),
            candidates=which.reshape(candidates.shape),
            floor=partial(bank.floor, direction=self.direction),
        )


@dataclass(frozen=True)
class _DevTokens:
    """Tokens of n images of a dev set, rounded to bfloat16 as in an index.

    Attributes:
        images: indices of the images in the dev set, ascending, int64 [n].
        blocks: tokens of the images, bfloat16 [n, m, d].
    """

    images: NDArray[np.int64]
    blocks: torch.Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, bundle: ModelBundle, dev: DevSet, features: Features, positions: NDArray[np.int64]) -> _DevTokens:
        """Compute the tokens of the images with the indices `positions`. Repeated indices are computed once.

        Raises:
            _UnreadableImages: images cannot be read.
        """
        adapter = trained_part(bundle.adapter)
        images, blocks, unreadable = np.unique(positions), [], []
        for start in range(0, len(images), _ADAPTER_BATCH):
            batch = images[start : start + _ADAPTER_BATCH]
            values, readable = features.fetch_readable(dev.rows[batch])
            unreadable.extend(batch[~readable].tolist())
            if not unreadable:
                blocks.append(adapter(values.to(bundle.joint.device).float()).bfloat16().cpu())
        if unreadable:
            raise _UnreadableImages(np.array(unreadable))
        return cls(images, torch.cat(blocks))

    def at(self, positions: NDArray[np.int64]) -> torch.Tensor:
        """Return the block of the image at each of `positions`, bfloat16 [*positions.shape, m, d]."""
        return self.blocks[torch.from_numpy(np.searchsorted(self.images, positions))]
