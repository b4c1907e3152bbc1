"""Fits the pooled similarity of a trained adapter in closed form, from the training images and captions.

1. Canonical correlation analysis (Vinod, 1976) of patch features and captions finds a common space.
2. Ridge regression predicts the vector of an image in this space from the tokens of the image.

Step 1 uses patch features, because adapter tokens overfit their training captions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edje_index.models.joint_encoder import JointEncoder
from edje_index.progress import OnProgress
from edje_index.scoring.parts import PooledSimilarity, token_statistics, word_bags
from edje_index.training.batches import BatchSource, SpecialTokens, TrainingData, joint_rows
from edje_index.training.features import Features
from edje_index.training.random_streams import POOLING, stream

FIT_IMAGES = 10_000  # bounds memory: 50,000 captions as bags of 4,000 words take 3 GB
MIN_CAPTIONS = 10  # a word is used if at least this many captions contain it
MAX_WORDS = 4_000
_WORDS_SHARE = 3.0  # norm of a caption's bag of words; the norm of the caption's hidden state is about 1
_IMAGE_BATCH, _CAPTION_BATCH = 64, 256
# Chosen on the dev captions of Flickr8k. A ridge is a fraction of the mean variance.
PATCH_RIDGE = 0.1
CAPTION_RIDGE = 0.1
TOKEN_RIDGE = 0.01
POWER = 1.5
_ACTIVITY = "fitting the pooled similarity, images"


def fit_pooled_similarity(
    adapter: nn.Module,
    joint: JointEncoder,
    source: BatchSource,
    dim: int,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> PooledSimilarity:
    """Fit the pooled similarity to at most 10,000 random images of `source`, with all views and captions of each image.

    Args:
        adapter: the trained adapter, which maps features [b, n, d_v] to tokens [b, m, d].
        joint: the joint encoder. Its language model reads the captions.
        source: features, views and captions of the training data.
        dim: maximum width of the pooled vectors. The width is smaller if images or captions have fewer dimensions.
        on_progress: called with the number of images and views that were read.
    """
    data = source.data
    chosen = np.sort(stream(source.config.loop.seed, POOLING).permutation(data.images)[:FIT_IMAGES])
    images = _pool_images(adapter, source, chosen, joint.device, on_progress)
    captions = _Captions.of(joint, data, chosen)
    patches = (images.patches - images.patches.mean(dim=0)) / column_scale(images.patches)
    of_images, of_captions = canonical_maps(
        patches.T @ patches / len(patches),
        captions.columns.T @ captions.columns / len(captions.columns),
        patches.T @ captions.mean_per_image[torch.from_numpy(images.image)] / len(patches),
        dim,
    )
    token_mean, token_scale = images.tokens.mean(dim=0), column_scale(images.tokens)
    of_tokens = ridge_map((images.tokens - token_mean) / token_scale, patches @ of_images) / token_scale[:, None]
    of_sentences = of_captions[: joint.width] / captions.sentence_scale[:, None]
    of_words = _WORDS_SHARE * of_captions[joint.width :]
    caption_offset = -(captions.sentence_mean @ of_sentences + captions.bag_mean @ of_words)
    fitted = PooledSimilarity(joint.width, len(captions.word_ids), of_words.shape[1])
    fitted.load_state_dict(
        {
            "image": of_tokens.float(),
            "image_offset": -(token_mean @ of_tokens).float(),
            "sentence": of_sentences.float(),
            "word_numbers": captions.word_ids,
            "word_weights": captions.word_weights,
            "words": of_words.float(),
            "caption_offset": caption_offset.float(),
        }
    )
    return fitted


@dataclass(frozen=True)
class _Captions:
    """The c captions of n images as vectors, for canonical correlation analysis.

    Attributes:
        columns: mean hidden state [d] and bag of words [w] of each caption, centred and scaled, float64 [c, d + w].
        mean_per_image: mean of `columns` over the captions of each image, float64 [n, d + w].
        sentence_mean: mean of the hidden states, subtracted in `columns` [d].
        sentence_scale: divisor of the hidden states in `columns` [d].
        bag_mean: mean of the bags of words, subtracted in `columns` [w].
        word_ids: token ids of the words that are counted, ascending [w].
        word_weights: weight of each counted word [w].
    """

    columns: torch.Tensor
    mean_per_image: torch.Tensor
    sentence_mean: torch.Tensor
    sentence_scale: torch.Tensor
    bag_mean: torch.Tensor
    word_ids: torch.Tensor
    word_weights: torch.Tensor

    @classmethod
    def of(cls, joint: JointEncoder, data: TrainingData, images: NDArray[np.int64]) -> Self:
        """Compute the vectors of all captions of the images with the numbers `images`, int64 [n]."""
        captions = np.concatenate([np.arange(*data.caption_starts[[image, image + 1]]) for image in images])
        image_of_caption = np.repeat(np.arange(len(images)), np.diff(data.caption_starts)[images])
        word_ids, word_weights = _counted_words(data, captions)
        sentences = _sentence_vectors(joint, data, captions)
        sentence_mean, sentence_scale = sentences.mean(dim=0), column_scale(sentences) * joint.width**0.5
        columns = torch.empty(len(captions), joint.width + len(word_ids), dtype=torch.float64)
        columns[:, : joint.width] = (sentences - sentence_mean) / sentence_scale
        bags = columns[:, joint.width :]
        bags.copy_(word_bags([data.caption(caption).tolist() for caption in captions], word_ids, word_weights))
        bag_mean = bags.mean(dim=0)
        bags.sub_(bag_mean).mul_(_WORDS_SHARE)
        mean = torch.zeros(len(images), columns.shape[1], dtype=torch.float64)
        mean.index_add_(0, torch.from_numpy(image_of_caption), columns)
        mean /= torch.from_numpy(np.bincount(image_of_caption, minlength=len(images)).clip(min=1))[:, None]
        return cls(columns, mean, sentence_mean, sentence_scale, bag_mean, word_ids, word_weights)


@dataclass(frozen=True)
class _PooledImages:
    """Statistics of r images. Augmented views count as images.

    Attributes:
        patches: mean and standard deviation of the patch features, float64 [r, 2 d_v].
        tokens: statistics of the tokens, see `token_statistics`, float64 [r, 3 d].
        image: position of each image in the list of chosen images, int64 [r]. A view has the position of its image.
    """

    patches: torch.Tensor
    tokens: torch.Tensor
    image: NDArray[np.int64]


@torch.inference_mode()
def _pool_images(
    adapter: nn.Module, source: BatchSource, chosen: NDArray[np.int64], device: torch.device, on_progress: OnProgress
) -> _PooledImages:
    """Compute the statistics of the images with the numbers `chosen`, then of all views of these images."""
    parts: list[tuple[Features, NDArray[np.int64]]] = [(source.features, source.data.rows[chosen])]
    if (views := source.views) is not None:
        parts += [(views.features, views.rows[chosen, view]) for view in range(views.rows.shape[1])]
    patches, tokens, image = [], [], []
    total = len(chosen) * len(parts)
    for part, (features, rows) in enumerate(parts):
        for start in range(0, len(rows), _IMAGE_BATCH):
            existing = start + np.flatnonzero(rows[start : start + _IMAGE_BATCH] >= 0)
            if len(existing):
                blocks, readable = features.fetch(rows[existing])
                existing, blocks = existing[readable], blocks[torch.from_numpy(readable)].to(device).float()
            if len(existing):
                deviation, mean = torch.std_mean(blocks, dim=1, correction=0)
                patches.append(torch.cat([mean, deviation], dim=1).cpu())
                # bfloat16, as an index stores tokens
                tokens.append(token_statistics(adapter(blocks).bfloat16()).cpu())
                image.append(existing)
            on_progress(_ACTIVITY, part * len(chosen) + min(start + _IMAGE_BATCH, len(rows)), total)
    return _PooledImages(torch.cat(patches).double(), torch.cat(tokens).double(), np.concatenate(image))


def _counted_words(data: TrainingData, captions: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most frequent token ids in ascending order [w], and the inverse document frequency of each [w]."""
    distinct = np.concatenate([np.unique(data.caption(caption)) for caption in captions])
    token_ids, counts = np.unique(distinct, return_counts=True)
    kept = np.flatnonzero(counts >= MIN_CAPTIONS)
    kept = np.sort(kept[np.argsort(-counts[kept], kind="stable")[:MAX_WORDS]])
    weights = np.log(len(captions) / counts[kept])
    return torch.from_numpy(token_ids[kept].astype(np.int64)), torch.from_numpy(weights.astype(np.float32))


def _sentence_vectors(joint: JointEncoder, data: TrainingData, captions: NDArray[np.int64]) -> torch.Tensor:
    """Compute the mean hidden state of each caption, float64 [c, d]."""
    special_tokens = SpecialTokens.of(joint.tokenizer)
    order = np.argsort(np.diff(data.token_starts)[captions], kind="stable")
    vectors = torch.empty(len(captions), joint.width, dtype=torch.float64)
    for start in range(0, len(order), _CAPTION_BATCH):
        batch = order[start : start + _CAPTION_BATCH]
        inputs = joint_rows([data.caption(caption) for caption in captions[batch]], 0, special_tokens)
        vectors[batch] = joint.sentence_vectors(inputs).double().cpu()
    return vectors


def canonical_maps(
    images: torch.Tensor, captions: torch.Tensor, across: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run canonical correlation analysis with ridge regularisation (Vinod, 1976).

    Args:
        images: covariance matrix of the image variables [p, p].
        captions: covariance matrix of the caption variables [q, q].
        across: covariance matrix between image variables and caption variables [p, q].
        dim: maximum width of the common space.

    Returns:
        The matrix that maps image variables into the common space [p, k], and the matrix that maps caption variables
        into the common space [q, k], with k at most `dim`. Each dimension of this space is scaled by a power of its
        canonical correlation (Gong et al., 2014).
    """
    left, right = _inverse_root(images, PATCH_RIDGE), _inverse_root(captions, CAPTION_RIDGE)
    u, correlations, vh = torch.linalg.svd(left @ across @ right, full_matrices=False)
    scale = correlations[:dim] ** POWER
    return left @ u[:, :dim] * scale, right @ vh.T[:, :dim] * scale


def _inverse_root(covariance: torch.Tensor, ridge: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0)
    ridged = values + ridge * values.mean().clamp(min=torch.finfo(values.dtype).tiny)
    root: torch.Tensor = vectors * ridged.rsqrt() @ vectors.T
    return root


def ridge_map(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the ridge-regression matrix [p, k] that predicts `targets` [n, k] from centred `inputs` [n, p]."""
    gram = inputs.T @ inputs
    penalty = TOKEN_RIDGE * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    gram.diagonal().add_(penalty)
    solved: torch.Tensor = torch.linalg.solve(gram, inputs.T @ targets)
    return solved


def column_scale(values: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of each column of `values` [n, p], shape [p]; 1 for a constant column."""
    deviation = values.std(dim=0, correction=0)
    return torch.where(deviation > 1e-9, deviation, 1.0)
