"""The common interface of text towers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from edje_index.progress import OnProgress

TEXTS_PER_REPORT = 1024


class TextEncoder(ABC):
    """Maps texts to L2-normalised embeddings in the space of the image embeddings."""

    @abstractmethod
    def embed(self, texts: list[str]) -> torch.Tensor:
        """Return the L2-normalised embeddings of one batch of texts, float32 [len(texts), embed_dim]."""

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], batch_size: int = 256) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the L2-normalised embeddings of ``texts``, float32 [len(texts), embed_dim]."""
        if isinstance(texts, str) or not texts:
            raise ValueError("texts must be a list of at least one string")
        # Texts of similar length share a batch, so that little padding is computed.
        order = sorted(range(len(texts)), key=lambda position: len(texts[position]))
        starts = range(0, len(texts), batch_size)
        batches = [[texts[position] for position in order[start : start + batch_size]] for start in starts]
        embeddings = torch.cat([self.embed(batch).float().cpu() for batch in batches])
        result = np.empty(embeddings.shape, dtype=np.float32)
        result[order] = embeddings.numpy()
        return result


def embed_texts(
    tower: TextEncoder,
    texts: Sequence[str],
    on_progress: OnProgress,
    *,
    texts_per_report: int = TEXTS_PER_REPORT,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the embedding of each text, float32 [len(texts), embed_dim]. Equal texts are embedded once.

    Args:
        tower: text tower.
        texts: at least one text.
        on_progress: called before each group of `texts_per_report` texts and at the end. An exception raised by
            `on_progress` stops this function.
        texts_per_report: number of texts between two calls of `on_progress`.
    """
    distinct = sorted(dict.fromkeys(texts), key=len)
    parts = []
    for start in range(0, len(distinct), texts_per_report):
        on_progress("embedding texts", start, len(distinct))
        parts.append(tower.encode(distinct[start : start + texts_per_report]))
    on_progress("embedding texts", len(distinct), len(distinct))
    rows = {text: row for row, text in enumerate(distinct)}
    embeddings: np.ndarray[Any, np.dtype[np.float32]] = np.concatenate(parts)[[rows[text] for text in texts]]
    return embeddings
