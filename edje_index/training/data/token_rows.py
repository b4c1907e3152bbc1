"""Makes input rows of the joint encoder from the token ids of captions.

From the texts of the same captions, `edje_index.models.joint_inputs.JointTokenizer.inputs` makes the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.models.joint_inputs import JointInputs, JointTokenizer

TokenIds = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids of the joint encoder's special tokens."""

    pad: int
    cls: int
    sep: int
    mask: int
    image: int

    @classmethod
    def of(cls, tokenizer: JointTokenizer) -> SpecialTokens:
        return cls(
            pad=tokenizer.special_id("pad_token"),
            cls=tokenizer.special_id("cls_token"),
            sep=tokenizer.special_id("sep_token"),
            mask=tokenizer.special_id("mask_token"),
            image=tokenizer.image_token_id,
        )


def joint_rows(captions: Sequence[TokenIds], image_tokens: int, special_tokens: SpecialTokens) -> JointInputs:
    """Return the input rows ``[CLS] caption [SEP] <image> x image_tokens [SEP]``, one per caption.

    Tokens after the first ``[SEP]`` have token type 1. All other tokens and padding have token type 0.
    """
    ids, lengths = _padded(captions, image_tokens + 1, special_tokens)
    position = np.arange(ids.shape[1])
    image_start = lengths + 2
    is_image = (position >= image_start) & (position < image_start + image_tokens)
    ids[is_image] = special_tokens.image
    ids[position == image_start + image_tokens] = special_tokens.sep
    types = (position >= image_start) & (position <= image_start + image_tokens)
    return _inputs(ids, types, position <= image_start + image_tokens)


def text_rows(captions: Sequence[TokenIds], special_tokens: SpecialTokens) -> JointInputs:
    """Return the input rows ``[CLS] caption [SEP]``, one per caption, without image tokens."""
    ids, lengths = _padded(captions, 0, special_tokens)
    position = np.arange(ids.shape[1])
    return _inputs(ids, np.zeros(ids.shape, dtype=bool), position <= lengths + 1)


@dataclass(frozen=True)
class MaskedCaptions:
    """Captions with masked tokens.

    Attributes:
        captions: token ids of each caption, where masked tokens have the id of ``[MASK]``.
        is_masked: which tokens of the concatenated captions are masked, bool [tokens].
        targets: original token ids of the masked tokens [masked].
    """

    captions: list[TokenIds]
    is_masked: NDArray[np.bool_]
    targets: TokenIds

    def flat_targets(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of the masked tokens and their original token ids, int64 [masked] each.

        A position is an index into the flattened input rows of shape [captions, width].
        """
        positions = np.concatenate([row * width + 1 + np.arange(len(c)) for row, c in enumerate(self.captions)])
        return torch.from_numpy(positions[self.is_masked]), torch.from_numpy(self.targets.astype(np.int64))


def mask_captions(
    captions: Sequence[TokenIds], probability: float, mask: int, rng: np.random.Generator
) -> MaskedCaptions:
    """Replace random tokens by the token id `mask`. Each token is replaced with the given `probability`."""
    flat = np.concatenate(captions)
    is_masked = rng.random(len(flat)) < probability
    masked = np.split(np.where(is_masked, mask, flat), np.cumsum([len(c) for c in captions])[:-1])
    return MaskedCaptions(masked, is_masked, flat[is_masked])


def _padded(
    captions: Sequence[TokenIds], extra: int, special_tokens: SpecialTokens
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows ``[CLS] caption [SEP]`` with at least `extra` padding tokens [b, t], and caption lengths [b, 1]."""
    lengths = np.array([[len(caption)] for caption in captions])
    ids = np.full((len(captions), lengths.max() + 2 + extra), special_tokens.pad, dtype=np.int64)
    position = np.arange(ids.shape[1])
    ids[:, 0] = special_tokens.cls
    ids[(position >= 1) & (position <= lengths)] = np.concatenate(captions)
    ids[position == lengths + 1] = special_tokens.sep
    return ids, lengths


def _inputs(ids: NDArray[np.int64], types: NDArray[np.bool_], attended: NDArray[np.bool_]) -> JointInputs:
    return JointInputs(
        torch.from_numpy(ids), torch.from_numpy(types.astype(np.int64)), torch.from_numpy(attended.astype(np.int64))
    )
