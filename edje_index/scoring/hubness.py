"""Hubness correction: lowers the scores of candidates that are similar to many queries (query-bank normalisation).

A model bundle may contain a `HubnessBank` of captions and images from the training data. The hubness of an image is

    t log mean_j exp((w <e, e_j> + u <p, p_j>) / t)

where e is the embedding and p the pooled vector of the image, and e_j is the embedding and p_j the pooled vector of
caption j in the bank. The weights w and u and the temperature t are fields of `HubnessSimilarity`. The hubness of a
caption is computed in the same way from the images in the bank.

The part ``hubness`` of the final score is minus the hubness (Bogolin et al., CVPR 2022; Smith et al., ICLR 2017).

The hubness has a lower limit: the 10 % quantile of the hubness in the bank. Without the limit, images that are unlike
all training images would rank first for every caption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edje_index.models.weights import assign_weights, limited_by, read_weights, save_weights
from edje_index.scoring.weights import TEXT_TO_IMAGE, HubnessSimilarity

_LARGEST_CODE = 127
_CHUNK = 256  # candidates per step; small, so that memory for their products with the bank is reused
_FLOOR_QUANTILE = 0.1


def hubness(
    embedding_products: torch.Tensor, pooled_products: torch.Tensor, *, embedding: Any, pooled: Any, temperature: Any
) -> torch.Tensor:
    """Compute the hubness of n candidates [n], without the lower limit. The result is differentiable.

    Args:
        embedding_products: inner products of candidate embeddings and bank embeddings [n, b].
        pooled_products: inner products of candidate pooled vectors and bank pooled vectors. The shape is [n, b] or
            broadcasts to [n, b].
        embedding, pooled, temperature: numbers or scalar tensors; see `HubnessSimilarity`.
    """
    similarities = (embedding * embedding_products + pooled * pooled_products) / temperature
    values: torch.Tensor = temperature * (torch.logsumexp(similarities, dim=1) - math.log(similarities.shape[1]))
    return values


class HubnessBank(nn.Module):
    """Embeddings and pooled vectors of training captions and training images, for computing hubness.

    Each vector is stored as int8 codes and one scale. All tensors are buffers, not trainable parameters.

    Args:
        captions: number of captions.
        images: number of images.
        embed_dim: width of the embeddings.
        dim: width of the pooled vectors; 0 if the model has no pooled similarity.
    """

    def __init__(self, captions: int, images: int, embed_dim: int, dim: int) -> None:
        super().__init__()
        self.caption_embeddings = _Int8Rows(captions, embed_dim)
        self.caption_vectors = _Int8Rows(captions, dim)
        self.image_embeddings = _Int8Rows(images, embed_dim)
        self.image_vectors = _Int8Rows(images, dim)
        self._floors: dict[tuple[HubnessSimilarity, str], float] = {}

    @classmethod
    def of(cls, captions: tuple[torch.Tensor, torch.Tensor], images: tuple[torch.Tensor, torch.Tensor]) -> HubnessBank:
        """Make a bank of captions and images.

        Args:
            captions: (embeddings [b, e], pooled vectors [b, k]) of captions.
            images: (embeddings [b, e], pooled vectors [b, k]) of images. b may differ between captions and images.
        """
        bank = cls(len(captions[0]), len(images[0]), captions[0].shape[1], captions[1].shape[1])
        rows = (bank.caption_embeddings, bank.caption_vectors, bank.image_embeddings, bank.image_vectors)
        for part, values in zip(rows, (*captions, *images), strict=True):
            part.fill(values)
        return bank

    @classmethod
    def load(cls, path: Path, embed_dim: int, sizes: Mapping[str, int]) -> HubnessBank:
        """Read a bank from a file that :meth:`save` wrote.

        Raises:
            ModelError: the file cannot be read, or the shapes in the file do not match `embed_dim` and `sizes`.
        """
        with limited_by(path):
            bank = cls(embed_dim=embed_dim, **sizes)
        assign_weights(bank, read_weights(path), str(path))
        return bank

    def save(self, path: Path) -> None:
        """Write the bank to a safetensors file."""
        save_weights(self, path)

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of ``captions`` and ``images``, and the width ``dim`` of the pooled vectors."""
        captions, dim = self.caption_vectors.codes.shape
        return {"captions": captions, "images": len(self.image_embeddings.codes), "dim": dim}

    def hubness(
        self, embeddings: torch.Tensor, vectors: torch.Tensor, similarity: HubnessSimilarity, direction: str
    ) -> torch.Tensor:
        """Compute the hubness of n candidates [n]. Values below :meth:`floor` are raised to :meth:`floor`.

        Args:
            embeddings: embeddings of the candidates, float32 [n, e].
            vectors: pooled vectors of the candidates, float32 [n, k].
            similarity: how candidates are compared with the bank.
            direction: "t2i" if candidates are images, "i2t" if candidates are captions.
        """
        values = self._values(embeddings, vectors, similarity, direction)
        return values.clamp(min=self.floor(similarity, direction))

    def floor(self, similarity: HubnessSimilarity, direction: str) -> float:
        """Return the lower limit of the hubness."""
        if (similarity, direction) not in self._floors:
            images = direction == TEXT_TO_IMAGE
            embeddings = self.image_embeddings if images else self.caption_embeddings
            vectors = self.image_vectors if images else self.caption_vectors
            values = self._values(embeddings.dense(), vectors.dense(), similarity, direction)
            self._floors[similarity, direction] = float(values.quantile(_FLOOR_QUANTILE))
        return self._floors[similarity, direction]

    def _values(
        self, embeddings: torch.Tensor, vectors: torch.Tensor, similarity: HubnessSimilarity, direction: str
    ) -> torch.Tensor:
        chunks = zip(torch.split(embeddings, _CHUNK), torch.split(vectors, _CHUNK), strict=True)
        return torch.cat([hubness(*self.products(*chunk, direction), **asdict(similarity)) for chunk in chunks])

    def products(
        self, embeddings: torch.Tensor, vectors: torch.Tensor, direction: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inner products of n candidates and the bank, of embeddings [n, b] and of pooled vectors [n, b].

        In direction "t2i", image candidates are compared with the captions in the bank. In "i2t", caption candidates
        are compared with the images in the bank. Without pooled similarity, the second result is zeros [1, 1].
        """
        captions = direction == TEXT_TO_IMAGE
        bank_embeddings = self.caption_embeddings if captions else self.image_embeddings
        bank_vectors = self.caption_vectors if captions else self.image_vectors
        pooled = vectors @ bank_vectors.dense().T if vectors.shape[1] else vectors.new_zeros(1, 1)
        return embeddings @ bank_embeddings.dense().T, pooled


class _Int8Rows(nn.Module):
    """Vectors [n, k], stored as int8 codes and one float32 scale per vector."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(count, width, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(count))

    def fill(self, values: torch.Tensor) -> None:
        """Round `values` [n, k] to int8 codes, and store them."""
        if values.shape[1]:
            self.scales = values.float().abs().amax(dim=1) / _LARGEST_CODE
            self.codes = (values / self.scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)

    def dense(self) -> torch.Tensor:
        return self.codes * self.scales[:, None]
