"""Hubness correction: candidates that are similar to many queries are scored lower (query-bank normalisation).

A model bundle may hold a `HubnessBank` of captions and images from its training data. The hubness of an image is

    t log mean_j exp((w <e, e_j> + u <p, p_j>) / t)

over the captions j of the bank, with embeddings e and pooled vectors p; w, u and the temperature t are those of
`HubnessSimilarity`. The hubness of a caption is the same over the images of the bank. The correction is minus the
hubness. It is query-bank normalisation (Bogolin et al., CVPR 2022) as a term of the score, after the inverted softmax
of Smith et al. (ICLR 2017).

The hubness has a lower limit, the 10 % quantile over the bank's own images (or captions). Without it, images unlike
any training photo would have the lowest hubness and come first for every caption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edje_index.models.size_limit import limited_by
from edje_index.models.weights import assign_weights, read_weights, save_weights
from edje_index.scoring.weights import TEXT_TO_IMAGE, HubnessSimilarity

_LARGEST_CODE = 127
_CHUNK = 256  # candidates at once: their products with the bank are reused memory
_FLOOR_QUANTILE = 0.1


def hubness(
    embedding_products: torch.Tensor, pooled_products: torch.Tensor, *, embedding: Any, pooled: Any, temperature: Any
) -> torch.Tensor:
    """The hubness [n] of n candidates, differentiable in all three weights.

    Args:
        embedding_products: inner products [n, b] of the candidates' embeddings with those of the bank.
        pooled_products: the same of the pooled vectors, [n, b] or one that broadcasts to it.
        embedding, pooled, temperature: see `HubnessSimilarity`; numbers or scalar tensors.
    """
    similarities = (embedding * embedding_products + pooled * pooled_products) / temperature
    values: torch.Tensor = temperature * (torch.logsumexp(similarities, dim=1) - math.log(similarities.shape[1]))
    return values


class HubnessBank(nn.Module):
    """Captions and images to compare candidates with, stored as int8 with one scale per vector.

    All tensors are buffers: gradients do not train them.

    Args:
        captions, images: numbers of captions and images.
        embed_dim: width of the embeddings.
        dim: width of the vectors of the pooled similarity; 0 if the model has none.
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
        """A bank of captions and images, each as embeddings [b, e] and pooled vectors [b, k]."""
        bank = cls(len(captions[0]), len(images[0]), captions[0].shape[1], captions[1].shape[1])
        rows = (bank.caption_embeddings, bank.caption_vectors, bank.image_embeddings, bank.image_vectors)
        for part, values in zip(rows, (*captions, *images), strict=True):
            part.fill(values)
        return bank

    @classmethod
    def load(cls, path: Path, embed_dim: int, sizes: Mapping[str, int]) -> HubnessBank:
        """Read the bank of `sizes` that :meth:`save` wrote. Raises ModelError if the file does not fit them."""
        with limited_by(path):
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

    def hubness(
        self, embeddings: torch.Tensor, vectors: torch.Tensor, similarity: HubnessSimilarity, direction: str
    ) -> torch.Tensor:
        """The hubness [n] of candidates, at least :meth:`floor`.

        Args:
            embeddings: float32 [n, e].
            vectors: vectors of the pooled similarity, float32 [n, k].
            similarity: how candidates are compared with the bank.
            direction: candidates are images in "t2i" and captions in "i2t".
        """
        values = self._values(embeddings, vectors, similarity, direction)
        return values.clamp(min=self.floor(similarity, direction))

    def floor(self, similarity: HubnessSimilarity, direction: str) -> float:
        """The lower limit of the hubness; computed once per similarity."""
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
        """The hubness [n] of candidates without the lower limit."""
        chunks = [
            hubness(*self.products(chunk_embeddings, chunk_vectors, direction), **asdict(similarity))
            for chunk_embeddings, chunk_vectors in zip(
                torch.split(embeddings, _CHUNK), torch.split(vectors, _CHUNK), strict=True
            )
        ]
        return torch.cat(chunks)

    def products(
        self, embeddings: torch.Tensor, vectors: torch.Tensor, direction: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inner products [n, b] of candidates with the bank: of embeddings and of pooled vectors.

        The latter are zeros [1, 1] if the model has no pooled similarity. Candidates in "t2i" are images, which are
        compared with captions.
        """
        captions = direction == TEXT_TO_IMAGE
        bank_embeddings = self.caption_embeddings if captions else self.image_embeddings
        bank_vectors = self.caption_vectors if captions else self.image_vectors
        pooled = vectors @ bank_vectors.dense().T if vectors.shape[1] else vectors.new_zeros(1, 1)
        return embeddings @ bank_embeddings.dense().T, pooled


class _Int8Rows(nn.Module):
    """Vectors [n, k], each int8 with one float32 scale."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(count, width, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(count))

    def fill(self, values: torch.Tensor) -> None:
        """Store `values` [n, k], rounded to int8."""
        if values.shape[1]:
            self.scales = values.float().abs().amax(dim=1) / _LARGEST_CODE
            self.codes = (values / self.scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)

    def dense(self) -> torch.Tensor:
        """The vectors as float32 [n, k]."""
        return self.codes * self.scales[:, None]
