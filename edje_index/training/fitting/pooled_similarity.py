"""Fitting the pooled similarity of a trained adapter: linear algebra over the training images, no steps.

First a canonical correlation analysis with ridges (Vinod, 1976) between pooled patches of images and their captions
finds the common space, its directions weighted by a power of their correlations (Gong et al., 2014). The captions have
no say in the second fit, which reads an image's place in that space off its pooled *tokens* by ridge regression: an
adapter shows captions that it was trained on more clearly than others, and a fit between its tokens and those
captions would count on that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edje_index.models.joint_encoder import JointEncoder
from edje_index.scoring.pooled_similarity import PooledSimilarity, pooled_tokens, word_bags
from edje_index.training.data.batches import BatchSource, Features
from edje_index.training.data.dataset import TrainingData
from edje_index.training.data.sampling import POOLING, stream
from edje_index.training.data.token_rows import SpecialTokens, joint_rows

FIT_IMAGES = 10_000  # of which 50,000 captions as bags of 4,000 words take 3 GB
MIN_CAPTIONS = 10  # that have a word, for the word to be counted
MAX_WORDS = 4_000
# Chosen on the dev captions of Flickr8k; the ridges are parts of the mean variance.
_PATCH_RIDGE = 0.1
_CAPTION_RIDGE = 0.1
_TOKEN_RIDGE = 0.01
_POWER = 1.5
_WORDS_SHARE = 3.0  # length of the words' part of a caption; that of the hidden state is about 1
_IMAGE_BATCH, _CAPTION_BATCH = 64, 256

OnProgress = Callable[[int, int], None]
"""Called with images done and their number, views counted."""


@dataclass(frozen=True)
class PooledImages:
    """n images and views of images.

    Attributes:
        patches: mean and standard deviation over an image's patches, float64 [n, 2 d_v].
        tokens: see `pooled_tokens`, float64 [n, 3 d].
        image: which of the images it is, or is a view of, int64 [n].
    """

    patches: torch.Tensor
    tokens: torch.Tensor
    image: NDArray[np.int64]


def fit_pooled(
    adapter: nn.Module,
    joint: JointEncoder,
    source: BatchSource,
    dim: int,
    on_progress: OnProgress = lambda done, total: None,
) -> PooledSimilarity:
    """The pooled similarity of what `adapter` makes of the images of `source`, at most 10,000 of them.

    Args:
        adapter: from features [b, n, d_v] to tokens [b, m, d], trained.
        joint: whose language model reads the captions.
        source: of features, views and captions.
        dim: k of the common space, at most; fewer where the images or captions have fewer dimensions.
        on_progress: of reading the images.
    """
    data = source.data
    chosen = np.sort(stream(source.config.loop.seed, POOLING).permutation(data.images)[:FIT_IMAGES])
    images = _pooled_images(adapter, source, chosen, joint.text_projection.weight.device, on_progress)
    captions = np.concatenate([np.arange(*data.caption_starts[[at, at + 1]]) for at in chosen])
    owner = np.repeat(np.arange(len(chosen)), np.diff(data.caption_starts)[chosen])
    numbers, weights = _counted_words(data, captions)
    sentences = _sentences(joint, data, captions)
    sentence_mean, sentence_scale = sentences.mean(dim=0), _scale(sentences) * joint.width**0.5
    words = torch.empty(len(captions), joint.width + len(numbers), dtype=torch.float64)
    words[:, : joint.width] = (sentences - sentence_mean) / sentence_scale
    bags = words[:, joint.width :]
    bags.copy_(word_bags([data.caption(at).tolist() for at in captions], numbers, weights))
    bag_mean = bags.mean(dim=0)
    bags.sub_(bag_mean).mul_(_WORDS_SHARE)
    described = torch.zeros(len(chosen), words.shape[1], dtype=torch.float64)
    described.index_add_(0, torch.from_numpy(owner), words)
    described /= torch.from_numpy(np.bincount(owner, minlength=len(chosen)).clip(min=1))[:, None]

    patches = (images.patches - images.patches.mean(dim=0)) / _scale(images.patches)
    across = patches.T @ described[torch.from_numpy(images.image)] / len(patches)
    of_images, of_captions = _canonical(patches.T @ patches / len(patches), words.T @ words / len(words), across, dim)
    places = patches @ of_images

    token_mean, token_scale = images.tokens.mean(dim=0), _scale(images.tokens)
    read = _ridge((images.tokens - token_mean) / token_scale, places) / token_scale[:, None]
    of_sentences = of_captions[: joint.width] / sentence_scale[:, None]
    of_words = _WORDS_SHARE * of_captions[joint.width :]
    fitted = PooledSimilarity(joint.width, len(numbers), of_words.shape[1])
    fitted.load_state_dict(
        {
            "image": read.float(),
            "image_offset": -(token_mean @ read).float(),
            "sentence": of_sentences.float(),
            "word_numbers": numbers,
            "word_weights": weights,
            "words": of_words.float(),
            "caption_offset": -(sentence_mean @ of_sentences + bag_mean @ of_words).float(),
        }
    )
    return fitted


def _canonical(
    images: torch.Tensor, captions: torch.Tensor, across: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps [p, k] and [q, k] into the common space from covariances [p, p], [q, q] and [p, q]."""
    left, right = _inverse_root(images, _PATCH_RIDGE), _inverse_root(captions, _CAPTION_RIDGE)
    u, correlations, vh = torch.linalg.svd(left @ across @ right, full_matrices=False)
    scale = correlations[:dim] ** _POWER
    return left @ u[:, :dim] * scale, right @ vh.T[:, :dim] * scale


def _inverse_root(covariance: torch.Tensor, ridge: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0)
    ridged = values + ridge * values.mean().clamp(min=torch.finfo(values.dtype).tiny)
    root: torch.Tensor = vectors * ridged.rsqrt() @ vectors.T
    return root


def _ridge(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The matrix [p, k] that maps centred inputs [n, p] to targets [n, k]."""
    gram = inputs.T @ inputs
    penalty = _TOKEN_RIDGE * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    gram.diagonal().add_(penalty)
    solved: torch.Tensor = torch.linalg.solve(gram, inputs.T @ targets)
    return solved


def _scale(values: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each column; 1 for a column of equal numbers."""
    deviation = values.std(dim=0, correction=0)
    return torch.where(deviation > 1e-9, deviation, 1.0)


@torch.inference_mode()
def _pooled_images(
    adapter: nn.Module, source: BatchSource, chosen: NDArray[np.int64], device: torch.device, on_progress: OnProgress
) -> PooledImages:
    parts: list[tuple[Features, NDArray[np.int64]]] = [(source.features, source.data.rows[chosen])]
    if (views := source.views) is not None:
        parts += [(views.features, views.rows[chosen, view]) for view in range(views.rows.shape[1])]
    patches, tokens, image = [], [], []
    total = len(chosen) * len(parts)
    for part, (features, rows) in enumerate(parts):
        for start in range(0, len(rows), _IMAGE_BATCH):
            there = start + np.flatnonzero(rows[start : start + _IMAGE_BATCH] >= 0)
            if len(there):
                blocks = features.fetch(rows[there]).to(device).float()
                deviation, mean = torch.std_mean(blocks, dim=1, correction=0)
                patches.append(torch.cat([mean, deviation], dim=1).cpu())
                tokens.append(pooled_tokens(adapter(blocks).bfloat16()).cpu())  # as they are stored
                image.append(there)
            on_progress(part * len(chosen) + min(start + _IMAGE_BATCH, len(rows)), total)
    return PooledImages(torch.cat(patches).double(), torch.cat(tokens).double(), np.concatenate(image))


def _counted_words(data: TrainingData, captions: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """The words that enough captions have, at most 4,000, ascending, and their inverse document frequencies."""
    distinct = np.concatenate([np.unique(data.caption(at)) for at in captions])
    numbers, counts = np.unique(distinct, return_counts=True)
    kept = np.flatnonzero(counts >= MIN_CAPTIONS)
    kept = np.sort(kept[np.argsort(-counts[kept], kind="stable")[:MAX_WORDS]])
    weights = np.log(len(captions) / counts[kept])
    return torch.from_numpy(numbers[kept].astype(np.int64)), torch.from_numpy(weights.astype(np.float32))


def _sentences(joint: JointEncoder, data: TrainingData, captions: NDArray[np.int64]) -> torch.Tensor:
    """Mean hidden states, float64 [c, d]; captions of like length go together."""
    special_tokens = SpecialTokens.of(joint.tokenizer)
    order = np.argsort(np.diff(data.token_starts)[captions], kind="stable")
    found = torch.empty(len(captions), joint.width, dtype=torch.float64)
    for start in range(0, len(order), _CAPTION_BATCH):
        places = order[start : start + _CAPTION_BATCH]
        inputs = joint_rows([data.caption(at) for at in captions[places]], 0, special_tokens)
        found[places] = joint.sentence_vectors(inputs).double().cpu()
    return found
