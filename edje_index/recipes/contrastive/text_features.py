"""Computes the features of all captions once, with the frozen layers of the text tower.

If layers of the text tower are trained, the features of a caption are hidden states, one per token. Otherwise they are
one pooled vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edje_index.progress import OnProgress

BATCH = 128
_TOKENIZER_BATCH = 4096
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TextFeatures:
    """Features of a batch of captions.

    Attributes:
        values: pooled vectors, float32 [b, d], or hidden states, float32 [b, t, d].
        mask: False for padding, bool [b, t]; None for pooled vectors.
    """

    values: torch.Tensor
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class CaptionFeatures:
    """Features of c captions.

    Attributes:
        values: pooled vectors, float32 [c, d], or hidden states of the s tokens in all captions, float16 [s, d].
        starts: offsets of the captions in ``values``, int64 [c + 1]; None for pooled vectors.
    """

    values: Array
    starts: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.starts is None else len(self.starts) - 1

    def batch(self, captions: torch.Tensor) -> TextFeatures:
        """Return the features of a batch of captions, padded to the longest caption.

        Args:
            captions: indices of the captions, int64 [b].
        """
        rows = captions.numpy()
        if self.starts is None:
            return TextFeatures(torch.from_numpy(self.values[rows]))
        lengths = self.starts[rows + 1] - self.starts[rows]
        positions = np.arange(lengths.max())
        mask = positions < lengths[:, None]
        hidden = np.zeros((*mask.shape, self.values.shape[1]), np.float32)
        hidden[mask] = self.values[(self.starts[rows][:, None] + positions)[mask]]
        return TextFeatures(torch.from_numpy(hidden), torch.from_numpy(mask))


@dataclass(frozen=True)
class FrozenTextTower:
    """The frozen layers of a text tower.

    Attributes:
        encoder: whole text tower, an ``open_clip.hf_model.HFTextEncoder``.
        tokenizer: tokenizer of the text tower.
        tuned_layers: number of trained layers, counted from the output of the text tower.
    """

    encoder: Any
    tokenizer: Any
    tuned_layers: int

    def token_ids(self, captions: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the token ids of ``captions``, padded to the context length t, int64 [c, t]."""
        starts = range(0, len(captions), _TOKENIZER_BATCH)
        return np.concatenate([self.tokenizer(list(captions[i : i + _TOKENIZER_BATCH])).numpy() for i in starts])

    @torch.inference_mode()
    def hidden(self, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the output of the last frozen layer, float32 [b, t, d].

        Args:
            token_ids: token ids [b, t].
            mask: False for padding, bool [b, t].
        """
        output = self.encoder.transformer(input_ids=token_ids, attention_mask=mask.long(), output_hidden_states=True)
        states: tuple[torch.Tensor, ...] = output.hidden_states
        return states[len(states) - 1 - self.tuned_layers]


def caption_features(tower: FrozenTextTower, captions: Sequence[str], on_progress: OnProgress) -> CaptionFeatures:
    """Return the features of ``captions``, computed with the frozen layers of a text tower."""
    token_ids = tower.token_ids(captions)
    padding_id, width = tower.encoder.config.pad_token_id, int(tower.encoder.config.hidden_size)
    lengths = (token_ids != padding_id).sum(1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    values = (
        np.zeros((starts[-1], width), np.float16)
        if tower.tuned_layers
        else np.zeros((len(captions), width), np.float32)
    )
    by_length = np.argsort(lengths, kind="stable")  # similar lengths share a batch, so there is little padding
    for begin in range(0, len(by_length), BATCH):
        rows = by_length[begin : begin + BATCH]
        ids = torch.from_numpy(token_ids[rows, : lengths[rows].max()])
        mask = ids != padding_id
        hidden = tower.hidden(ids, mask)
        if tower.tuned_layers:
            for row, states in zip(rows, hidden.numpy(), strict=True):
                values[starts[row] : starts[row + 1]] = states[: lengths[row]]
        else:
            values[rows] = ((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).numpy()
        on_progress("text features", begin + len(rows), len(by_length))
    return CaptionFeatures(values, starts if tower.tuned_layers else None)
