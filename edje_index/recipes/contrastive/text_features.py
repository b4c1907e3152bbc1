"""What the frozen part of the text tower makes of all captions, computed once.

With no layer tuned that is one pooled vector a caption; else the hidden states of its tokens below the tuned layers,
in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

BATCH = 128
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class TextFeatures:
    """Features of a batch of captions.

    Attributes:
        values: pooled float32 [b, d], or hidden states float32 [b, t, d].
        mask: bool [b, t], which tokens are there; None for pooled features.
    """

    values: torch.Tensor
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class CaptionFeatures:
    """Features of c captions.

    Attributes:
        values: pooled float32 [c, d], or hidden states of all their tokens, one caption after another, float16 [s, d].
        starts: tokens of caption i are starts[i] up to starts[i + 1], int64 [c + 1]; None for pooled features.
    """

    values: np.ndarray[Any, np.dtype[Any]]
    starts: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.starts is None else len(self.starts) - 1

    def batch(self, captions: torch.Tensor) -> TextFeatures:
        """Those of some captions, by number."""
        rows = captions.numpy()
        if self.starts is None:
            return TextFeatures(torch.from_numpy(self.values[rows]))
        lengths = self.starts[rows + 1] - self.starts[rows]
        place = np.arange(lengths.max())
        mask = place < lengths[:, None]
        hidden = np.zeros((*mask.shape, self.values.shape[1]), np.float32)
        hidden[mask] = self.values[(self.starts[rows][:, None] + place)[mask]]
        return TextFeatures(torch.from_numpy(hidden), torch.from_numpy(mask))


@torch.inference_mode()
def caption_features(
    text: Any, tokenizer: Any, captions: Sequence[str], tune_text: int, on_progress: OnProgress
) -> CaptionFeatures:
    """Run the frozen layers of an open_clip Hugging Face text tower over captions.

    Args:
        text: ``open_clip.hf_model.HFTextEncoder``.
        tokenizer: its tokenizer, as open_clip calls it.
        captions: c texts.
        tune_text: layers at the top that are left out.
        on_progress: (captions done, captions).
    """
    ids = _token_ids(tokenizer, captions)
    lengths = (ids != text.config.pad_token_id).sum(1)
    width = int(text.config.hidden_size)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    pooled = np.zeros((len(captions) if not tune_text else 0, width), np.float32)
    states = np.zeros((starts[-1] if tune_text else 0, width), np.float16)
    order = np.argsort(lengths, kind="stable")  # captions of about one length together: little padding
    for begin in range(0, len(order), BATCH):
        rows = order[begin : begin + BATCH]
        words = torch.from_numpy(ids[rows, : lengths[rows].max()])
        mask = words != text.config.pad_token_id
        hidden = _hidden(text.transformer, words, mask, tune_text)
        if tune_text:
            for row, values, length in zip(rows, hidden.numpy(), lengths[rows], strict=True):
                states[starts[row] : starts[row + 1]] = values[:length]
        else:
            pooled[rows] = ((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).numpy()
        on_progress(begin + len(rows), len(order))
    return CaptionFeatures(states, starts) if tune_text else CaptionFeatures(pooled)


def _token_ids(tokenizer: Any, captions: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    parts = [tokenizer(list(captions[i : i + 4096])).numpy() for i in range(0, len(captions), 4096)]
    result: np.ndarray[Any, np.dtype[np.int64]] = np.concatenate(parts)
    return result


def _hidden(transformer: Any, words: torch.Tensor, mask: torch.Tensor, tune_text: int) -> torch.Tensor:
    """Hidden states [b, t, d] below the last ``tune_text`` layers."""
    output = transformer(input_ids=words, attention_mask=mask.long(), output_hidden_states=True)
    states: tuple[torch.Tensor, ...] = output.hidden_states
    return states[len(states) - 1 - tune_text]
