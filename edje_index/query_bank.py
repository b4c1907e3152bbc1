"""Query bank: what an image gets from captions in general, which is taken off its score.

Some images are near to many captions and come up for all of them. A bundle may hold a bank of captions (and of images,
for the other direction) from its training. The prior of an image is

    prior = t log mean_j exp((w <e, e_j> + u <p, p_j>) / t)

over the captions j of the bank: e are embeddings and p vectors of the pooled similarity, with the weights that both
have in the score; a caption's is the same over the images of the bank. The final score is lower by a multiple of it:
querybank normalisation (Bogolin et al., CVPR 2022) as a term of the score, after the inverted softmax of Smith et al.
(ICLR 2017). The bank is a departure from the paper, and there is none unless `train --bank` made one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from edje_index.weights import assign_weights, read_weights, save_weights

_LARGEST = 127
_CHUNK = 1024


class QueryBank(nn.Module):
    """Captions and images to compare with, as int8 with one scale a vector. Buffers: nothing is trained by gradients.

    Args:
        captions, images: c and i, how many.
        embed_dim: e, width of embeddings.
        dim: k, width of vectors of the pooled similarity; 0 without.
        weight: of the prior in the final score.
        temperature: t, in units of the final score.
    """

    def __init__(self, captions: int, images: int, embed_dim: int, dim: int, weight: float, temperature: float) -> None:
        super().__init__()
        self.weight, self.temperature = weight, temperature
        self.caption_embeddings = _Int8Rows(captions, embed_dim)
        self.caption_vectors = _Int8Rows(captions, dim)
        self.image_embeddings = _Int8Rows(images, embed_dim)
        self.image_vectors = _Int8Rows(images, dim)

    @classmethod
    def of(cls, captions: tuple[torch.Tensor, torch.Tensor], images: tuple[torch.Tensor, torch.Tensor]) -> QueryBank:
        """A bank of embeddings and pooled vectors: [c, e] and [c, k], [i, e] and [i, k]. It has no weight yet."""
        bank = cls(len(captions[0]), len(images[0]), captions[0].shape[1], captions[1].shape[1], 0.0, 1.0)
        rows = (bank.caption_embeddings, bank.caption_vectors, bank.image_embeddings, bank.image_vectors)
        for part, values in zip(rows, (*captions, *images), strict=True):
            part.fill(values)
        return bank

    @classmethod
    def load(cls, path: Path, embed_dim: int, sizes: dict[str, float]) -> QueryBank:
        """The bank that :meth:`save` wrote, of `sizes`. ModelError where the file is another."""
        counts = {name: int(sizes[name]) for name in ("captions", "images", "dim")}
        bank = cls(**counts, embed_dim=embed_dim, weight=sizes["weight"], temperature=sizes["temperature"])
        assign_weights(bank, read_weights(path), str(path))
        return bank

    def save(self, path: Path) -> None:
        """Write the vectors as safetensors."""
        save_weights(self, path)

    @property
    def sizes(self) -> dict[str, float]:
        """What `bundle.json` says of it."""
        return {
            "captions": len(self.caption_embeddings),
            "images": len(self.image_embeddings),
            "dim": self.caption_vectors.codes.shape[1],
            "weight": self.weight,
            "temperature": self.temperature,
        }

    def of_images(
        self,
        embeddings: torch.Tensor,
        vectors: torch.Tensor,
        weights: tuple[float, float],
        temperature: float | None = None,
    ) -> torch.Tensor:
        """Priors [b] of images, without the weight.

        Args:
            embeddings: of the images, float32 [b, e].
            vectors: of the images in the space of the pooled similarity, float32 [b, k].
            weights: (w, u) of both in the score.
            temperature: another one than the bank's.
        """
        bank = (self.caption_embeddings, self.caption_vectors)
        return _priors(_scored(embeddings, vectors, bank, weights), temperature or self.temperature)

    def of_captions(
        self, embeddings: torch.Tensor, vectors: torch.Tensor, weights: tuple[float, float]
    ) -> torch.Tensor:
        """Priors [b] of captions, in the same way."""
        bank = (self.image_embeddings, self.image_vectors)
        return _priors(_scored(embeddings, vectors, bank, weights), self.temperature)

    def spread(self, embeddings: torch.Tensor, vectors: torch.Tensor, weights: tuple[float, float]) -> float:
        """Standard deviation of an image's scores over the captions of the bank, the mean of the images."""
        bank = (self.caption_embeddings, self.caption_vectors)
        rows = [scores.std(dim=1, correction=0) for scores in _scored(embeddings, vectors, bank, weights)]
        return float(torch.cat(rows).mean())


def _scored(
    embeddings: torch.Tensor,
    vectors: torch.Tensor,
    bank: tuple[_Int8Rows, _Int8Rows],
    weights: tuple[float, float],
) -> Iterator[torch.Tensor]:
    """Scores [b', n] of some rows [b'] after another with all of the bank [n]."""
    others = torch.cat([part.dense() * weight for part, weight in zip(bank, weights, strict=True)], dim=1)
    own = torch.cat([embeddings, vectors], dim=1)
    for start in range(0, len(own), _CHUNK):
        yield own[start : start + _CHUNK] @ others.T


def _priors(scored: Iterator[torch.Tensor], temperature: float) -> torch.Tensor:
    found = [torch.logsumexp(scores / temperature, dim=1) - math.log(scores.shape[1]) for scores in scored]
    return temperature * torch.cat(found)


class _Int8Rows(nn.Module):
    """Vectors [n, k], each int8 by one float32 scale."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(count, width, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(count))

    def __len__(self) -> int:
        return len(self.scales)

    def fill(self, values: torch.Tensor) -> None:
        """Round `values` [n, k]."""
        if values.shape[1]:
            self.scales = values.float().abs().amax(dim=1) / _LARGEST
            self.codes = (values / self.scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)

    def dense(self) -> torch.Tensor:
        """float32 [n, k]."""
        return self.codes * self.scales[:, None]
