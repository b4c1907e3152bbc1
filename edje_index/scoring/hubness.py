"""Query bank: what an image gets from captions in general, which is taken off its score.

Some images are near to many captions and come up for all of them. A bundle may hold a bank of captions (and of images,
for the other direction) from its training. The prior of an image is

    prior = t log mean_j exp((w <e, e_j> + u <p, p_j>) / t)

over the captions j of the bank: e are embeddings and p vectors of the pooled similarity, with the weights that both
have in the score; a caption's is the same over the images of the bank. The final score is lower by a multiple of it:
querybank normalisation (Bogolin et al., CVPR 2022) as a term of the score, after the inverted softmax of Smith et al.
(ICLR 2017). No prior is lower than that of a tenth of the bank's own images (or captions): what is like no photo of the
training is near to no caption either, and would come first for all of them. The bank is a departure from the paper, and
there is none unless `train --bank` made one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from edje_index.models.weights import assign_weights, read_weights, save_weights
from edje_index.scoring.weights import ScoreWeights

_LARGEST = 127
_CHUNK = 1024
_FLOOR = 0.1


class QueryBank(nn.Module):
    """Captions and images to compare with, as int8 with one scale a vector. Buffers: nothing is trained by gradients.

    Args:
        captions, images: c and i, how many.
        embed_dim: e, width of embeddings.
        dim: k, width of vectors of the pooled similarity; 0 without.
    """

    def __init__(self, captions: int, images: int, embed_dim: int, dim: int) -> None:
        super().__init__()
        self.caption_embeddings = _Int8Rows(captions, embed_dim)
        self.caption_vectors = _Int8Rows(captions, dim)
        self.image_embeddings = _Int8Rows(images, embed_dim)
        self.image_vectors = _Int8Rows(images, dim)
        self._floors: dict[tuple[ScoreWeights, bool], float] = {}

    @classmethod
    def of(cls, captions: tuple[torch.Tensor, torch.Tensor], images: tuple[torch.Tensor, torch.Tensor]) -> QueryBank:
        """A bank of embeddings and pooled vectors: [c, e] and [c, k], [i, e] and [i, k]."""
        bank = cls(len(captions[0]), len(images[0]), captions[0].shape[1], captions[1].shape[1])
        rows = (bank.caption_embeddings, bank.caption_vectors, bank.image_embeddings, bank.image_vectors)
        for part, values in zip(rows, (*captions, *images), strict=True):
            part.fill(values)
        return bank

    @classmethod
    def load(cls, path: Path, embed_dim: int, sizes: Mapping[str, int]) -> QueryBank:
        """The bank that :meth:`save` wrote, of `sizes`. ModelError where the file is another."""
        bank = cls(embed_dim=embed_dim, **sizes)
        assign_weights(bank, read_weights(path), str(path))
        return bank

    def save(self, path: Path) -> None:
        """Write the vectors as safetensors."""
        save_weights(self, path)

    @property
    def sizes(self) -> dict[str, int]:
        """``captions``, ``images`` and ``dim``."""
        captions, dim = self.caption_vectors.codes.shape
        return {"captions": captions, "images": len(self.image_embeddings.codes), "dim": dim}

    def of_images(self, embeddings: torch.Tensor, vectors: torch.Tensor, weights: ScoreWeights) -> torch.Tensor:
        """Priors [b] of images, not weighted yet.

        Args:
            embeddings: of the images, float32 [b, e].
            vectors: of the images in the space of the pooled similarity, float32 [b, k].
            weights: of which `similarity`, `pooled` and `temperature` count.
        """
        priors = _priors(embeddings, vectors, (self.caption_embeddings, self.caption_vectors), weights)
        return priors.clamp(min=self.floor(weights, images=True))

    def of_captions(self, embeddings: torch.Tensor, vectors: torch.Tensor, weights: ScoreWeights) -> torch.Tensor:
        """Priors [b] of captions, in the same way."""
        priors = _priors(embeddings, vectors, (self.image_embeddings, self.image_vectors), weights)
        return priors.clamp(min=self.floor(weights, images=False))

    def floor(self, weights: ScoreWeights, *, images: bool) -> float:
        """The lowest prior of images, or of captions: that of a tenth of the bank's own. Found once for `weights`."""
        if (weights, images) not in self._floors:
            captions = (self.caption_embeddings, self.caption_vectors)
            own, others = (self.image_embeddings, self.image_vectors), captions
            if not images:
                own, others = others, own
            priors = _priors(own[0].dense(), own[1].dense(), others, weights)
            self._floors[weights, images] = float(priors.quantile(_FLOOR))
        return self._floors[weights, images]

    def caption_products(self, embeddings: torch.Tensor, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inner products [b, c] of images' embeddings and of their vectors with those of the captions, on the CPU.

        The latter are zeros [1, 1] without a pooled similarity.
        """
        return _products(embeddings, vectors, (self.caption_embeddings, self.caption_vectors))

    def image_products(self, embeddings: torch.Tensor, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of captions with the images [b, i]."""
        return _products(embeddings, vectors, (self.image_embeddings, self.image_vectors))


def _products(
    embeddings: torch.Tensor, vectors: torch.Tensor, bank: tuple[_Int8Rows, _Int8Rows]
) -> tuple[torch.Tensor, torch.Tensor]:
    pooled = vectors @ bank[1].dense().T if vectors.shape[1] else torch.zeros(1, 1)
    return (embeddings @ bank[0].dense().T).cpu(), pooled.cpu()


def _priors(
    embeddings: torch.Tensor, vectors: torch.Tensor, bank: tuple[_Int8Rows, _Int8Rows], weights: ScoreWeights
) -> torch.Tensor:
    t = weights.temperature
    others = torch.cat([bank[0].dense() * (weights.similarity / t), bank[1].dense() * (weights.pooled / t)], dim=1).T
    own = torch.cat([embeddings, vectors], dim=1)
    parts = [torch.logsumexp(own[start : start + _CHUNK] @ others, dim=1) for start in range(0, len(own), _CHUNK)]
    return t * (torch.cat(parts) - math.log(others.shape[1]))


class _Int8Rows(nn.Module):
    """Vectors [n, k], each int8 by one float32 scale."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(count, width, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(count))

    def fill(self, values: torch.Tensor) -> None:
        """Round `values` [n, k]."""
        if values.shape[1]:
            self.scales = values.float().abs().amax(dim=1) / _LARGEST
            self.codes = (values / self.scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)

    def dense(self) -> torch.Tensor:
        """float32 [n, k]."""
        return self.codes * self.scales[:, None]
