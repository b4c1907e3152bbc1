"""Fits the pooled similarity of a trained adapter in closed form, from the training
images and captions.

1. Canonical correlation analysis (Vinod, 1976) of patch features and captions finds a
   common space.
2. Ridge regression predicts the vector of an image in this space from the tokens of the
   image.

Step 1 uses patch features, because adapter tokens overfit their training captions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from edje_index.models.joint_encoder import JointEncoder
from edje_index.progress import OnProgress
from edje_index.scoring.parts import PooledSimilarity, token_statistics, word_bags
from edje_index.training.batches import POOLING, stream
from edje_index.training.dataset import TrainingData

# Largest number of images that the fit reads, which limits its memory. For 10,000
# images with 5 captions each, the bags of words, with 4,000 words, take 3 GB.
FIT_IMAGES = 10_000
# The bags of words contain a word only if at least this many captions contain it.
MIN_CAPTIONS = 10
MAX_WORDS = 4_000
# Norm of the bag of words of a caption in the canonical correlation analysis. The norm
# of the mean hidden state of a caption is about 1, so the words have more influence.
_WORDS_SHARE = 3.0
_IMAGE_BATCH = 64
_CAPTION_BATCH = 256
# These values were chosen on the dev captions of Flickr8k. A ridge is a fraction of the
# mean variance. `POWER` is the exponent of the canonical correlations, see
# `canonical_maps`.
PATCH_RIDGE = 0.1
CAPTION_RIDGE = 0.1
TOKEN_RIDGE = 0.01
POWER = 1.5
# added to ridges, so that a matrix of zeros has an inverse too
_TINY = 1e-30
_ACTIVITY = "fitting the pooled similarity, images"


def fit_pooled_similarity(
    adapter: nn.Module,
    joint: JointEncoder,
    data: TrainingData,
    seed: int,
    dim: int,
    on_progress: OnProgress,
) -> PooledSimilarity:
    """Fit the pooled similarity to at most 10,000 random images of `data`, with all
    captions of each image. The images depend on `seed`.

    Args:
        adapter: the trained adapter, which maps features [b, n, d_v] to tokens [b, m,
            d].
        joint: the joint encoder. Its language model reads the captions.
        dim: maximum width of the pooled vectors. The width is smaller than `dim` if the
            fit describes an image or a caption by fewer than `dim` numbers.
        on_progress: called with the name of the activity, the number of images that
            were read so far, and the number to read.
    """
    order = stream(seed, POOLING).permutation(data.images)
    chosen = np.sort(order[:FIT_IMAGES])
    # For each image: mean and standard deviation of the patch features, and statistics
    # of the tokens.
    patch_parts = []
    token_parts = []
    for start in range(0, len(chosen), _IMAGE_BATCH):
        blocks = data.blocks(chosen[start : start + _IMAGE_BATCH])
        blocks = blocks.to(joint.device).float()
        deviation, mean = torch.std_mean(blocks, dim=1, correction=0)
        patch_parts.append(torch.cat([mean, deviation], dim=1).cpu())
        # The tokens are rounded to bfloat16, as in an index.
        with torch.inference_mode():
            token_parts.append(token_statistics(adapter(blocks).bfloat16()).cpu())
        on_progress(_ACTIVITY, min(start + _IMAGE_BATCH, len(chosen)), len(chosen))
    patches = torch.cat(patch_parts).double()
    tokens = torch.cat(token_parts).double()
    caption_counts = np.diff(data.caption_starts)
    image_of_caption = np.repeat(np.arange(data.images), caption_counts)
    captions = np.flatnonzero(np.isin(image_of_caption, chosen))
    # Each caption becomes a vector, a row of `columns`. The vector is the mean hidden
    # state of the caption, followed by the bag of words of the caption, and is centred
    # and scaled. The words of a bag are the most frequent token ids in ascending order,
    # weighted by their inverse document frequencies.
    texts = [
        joint.tokenizer.truncated(data.caption(caption))
        for caption in captions.tolist()
    ]
    distinct = np.concatenate([np.unique(text) for text in texts])
    token_ids, counts = np.unique(distinct, return_counts=True)
    kept = np.flatnonzero(counts >= MIN_CAPTIONS)
    kept = np.sort(kept[np.argsort(-counts[kept], kind="stable")[:MAX_WORDS]])
    word_ids = torch.from_numpy(token_ids[kept].astype(np.int64))
    word_weights = torch.from_numpy(
        np.log(len(captions) / counts[kept]).astype(np.float32)
    )
    scorer = joint.scorer()
    order = np.argsort(data.records["length"][captions], kind="stable")
    sentences = torch.empty(len(captions), joint.width, dtype=torch.float64)
    for start in range(0, len(order), _CAPTION_BATCH):
        batch = order[start : start + _CAPTION_BATCH]
        inputs = joint.tokenizer.inputs_of_ids([texts[caption] for caption in batch], 0)
        sentences[batch] = scorer.sentence_vectors(inputs).double().cpu()
    sentences, sentence_mean, sentence_scale = standardised(sentences)
    columns = torch.empty(
        len(captions), joint.width + len(word_ids), dtype=torch.float64
    )
    # The norm of this part of a vector is about 1.
    columns[:, : joint.width] = sentences / joint.width**0.5
    bags = columns[:, joint.width :]
    bags.copy_(word_bags(texts, word_ids, word_weights))
    bag_mean = bags.mean(dim=0)
    bags.sub_(bag_mean).mul_(_WORDS_SHARE)
    mean_per_image = torch.zeros(len(chosen), columns.shape[1], dtype=torch.float64)
    positions = np.searchsorted(chosen, image_of_caption[captions])
    mean_per_image.index_add_(0, torch.from_numpy(positions), columns)
    mean_per_image /= torch.from_numpy(caption_counts[chosen])[:, None]
    patches, _, _ = standardised(patches)
    of_images, of_captions = canonical_maps(
        patches.T @ patches / len(patches),
        columns.T @ columns / len(columns),
        patches.T @ mean_per_image / len(patches),
        dim,
    )
    tokens, token_mean, token_scale = standardised(tokens)
    of_tokens = ridge_map(tokens, patches @ of_images) / token_scale[:, None]
    sentence_scale *= joint.width**0.5
    of_sentences = of_captions[: joint.width] / sentence_scale[:, None]
    of_words = _WORDS_SHARE * of_captions[joint.width :]
    caption_offset = -(sentence_mean @ of_sentences + bag_mean @ of_words)
    fitted = PooledSimilarity(joint.width, len(word_ids), of_words.shape[1])
    fitted.load_state_dict(
        {
            "image": of_tokens.float(),
            "image_offset": -(token_mean @ of_tokens).float(),
            "sentence": of_sentences.float(),
            "word_numbers": word_ids,
            "word_weights": word_weights,
            "words": of_words.float(),
            "caption_offset": caption_offset.float(),
        }
    )
    return fitted


def canonical_maps(
    images: Tensor, captions: Tensor, across: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Run canonical correlation analysis with ridge regularisation (Vinod, 1976).

    Args:
        images: covariance matrix of the image variables [p, p].
        captions: covariance matrix of the caption variables [q, q].
        across: covariance matrix between image variables and caption variables [p, q].
        dim: maximum width of the common space.

    Returns:
        The matrix that maps image variables into the common space [p, k], and the
        matrix that maps caption variables into the common space [q, k], with k at most
        `dim`. Each dimension of this space is scaled by a power of its canonical
        correlation (Gong et al., 2014).
    """
    left = _inverse_root(images, PATCH_RIDGE)
    right = _inverse_root(captions, CAPTION_RIDGE)
    u, correlations, vh = torch.linalg.svd(left @ across @ right, full_matrices=False)
    scale = correlations[:dim] ** POWER
    return left @ u[:, :dim] * scale, right @ vh.T[:, :dim] * scale


def _inverse_root(covariance: Tensor, ridge: float) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0)
    ridged = values + ridge * values.mean() + _TINY
    root: Tensor = vectors * ridged.rsqrt() @ vectors.T
    return root


def ridge_map(inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the ridge-regression matrix [p, k] that predicts `targets` [n, k] from
    centred `inputs` [n, p].
    """
    gram = inputs.T @ inputs
    gram.diagonal().add_(TOKEN_RIDGE * gram.diagonal().mean() + _TINY)
    solved: Tensor = torch.linalg.solve(gram, inputs.T @ targets)
    return solved


def standardised(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `values` [n, p] with the mean 0 and the standard deviation 1 in each
    column, and the mean and the standard deviation of each column, shape [p] each. A
    constant column is only shifted.
    """
    deviation, mean = torch.std_mean(values, dim=0, correction=0)
    scale = torch.where(deviation > 1e-9, deviation, 1.0)
    return (values - mean) / scale, mean, scale
