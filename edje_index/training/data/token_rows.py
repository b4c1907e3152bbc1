"""Input rows of the joint encoder from captions that are tokens already, many at a time.

They are what `edje_index.models.joint_inputs.JointTokenizer.inputs` makes of the same captions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.models.joint_inputs import JointInputs, JointTokenizer

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SpecialTokens:
    """Numbers of the special words."""

    pad: int
    cls: int
    sep: int
    mask: int
    image: int

    @classmethod
    def of(cls, tokenizer: JointTokenizer) -> SpecialTokens:
        """Those of a tokenizer."""
        words = tokenizer.tokenizer
        return cls(
            words.pad_token_id,
            words.cls_token_id,
            words.sep_token_id,
            words.mask_token_id,
            tokenizer.image_token_id,
        )


def joint_rows(captions: Sequence[Tokens], image_tokens: int, special_tokens: SpecialTokens) -> JointInputs:
    """``[CLS] caption [SEP] <image> x m [SEP]``, the image's part of type 1."""
    ids, lengths = _text(captions, image_tokens + 1, special_tokens)
    place = np.arange(ids.shape[1])
    after = lengths + 2  # of the text and its special_tokens
    is_image = (place >= after) & (place < after + image_tokens)
    ids[is_image] = special_tokens.image
    ids[place == after + image_tokens] = special_tokens.sep
    types = (place >= after) & (place <= after + image_tokens)
    return _inputs(ids, types, place <= after + image_tokens)


def text_rows(captions: Sequence[Tokens], special_tokens: SpecialTokens) -> JointInputs:
    """``[CLS] caption [SEP]``."""
    ids, lengths = _text(captions, 0, special_tokens)
    place = np.arange(ids.shape[1])
    return _inputs(ids, np.zeros(ids.shape, dtype=bool), place <= lengths + 1)


@dataclass(frozen=True)
class MaskedCaptions:
    """Captions with words covered.

    Attributes:
        captions: with ``[MASK]`` in them.
        chosen: which of all their tokens are covered, one caption after another [tokens].
        targets: what stood there [covered].
    """

    captions: list[Tokens]
    chosen: NDArray[np.bool_]
    targets: Tokens

    def places(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the covered tokens lie in the flattened rows [captions x width], and what stood there, int64 each."""
        starts = np.concatenate([row * width + 1 + np.arange(len(c)) for row, c in enumerate(self.captions)])
        return torch.from_numpy(starts[self.chosen]), torch.from_numpy(self.targets.astype(np.int64))


def mask_captions(
    captions: Sequence[Tokens], probability: float, mask: int, rng: np.random.Generator
) -> MaskedCaptions:
    """Replace each caption token by ``[MASK]`` with `probability`; special and image tokens are none of them."""
    flat = np.concatenate(captions)
    chosen = rng.random(len(flat)) < probability
    covered = np.split(np.where(chosen, mask, flat), np.cumsum([len(c) for c in captions])[:-1])
    return MaskedCaptions(covered, chosen, flat[chosen])


def _text(
    captions: Sequence[Tokens], room: int, special_tokens: SpecialTokens
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows with ``[CLS] caption [SEP]`` and `room` more places, and the captions' lengths [b, 1]."""
    lengths = np.array([[len(caption)] for caption in captions])
    ids = np.full((len(captions), lengths.max() + 2 + room), special_tokens.pad, dtype=np.int64)
    place = np.arange(ids.shape[1])
    ids[:, 0] = special_tokens.cls
    ids[(place >= 1) & (place <= lengths)] = np.concatenate(captions)
    ids[place == lengths + 1] = special_tokens.sep
    return ids, lengths


def _inputs(ids: NDArray[np.int64], types: NDArray[np.bool_], attended: NDArray[np.bool_]) -> JointInputs:
    return JointInputs(
        torch.from_numpy(ids), torch.from_numpy(types.astype(np.int64)), torch.from_numpy(attended.astype(np.int64))
    )
