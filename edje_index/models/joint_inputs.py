"""The joint encoder's input: ``[CLS] caption [SEP] <image> x m [SEP]``, as in the published EDJE code.

``[CLS]``, the caption and the first ``[SEP]`` have token type 0; the image placeholders and the last ``[SEP]`` have
type 1. A long caption is truncated, the image never is: a row has at most 64 + m tokens.

The published training and evaluation canonicalise captions before the tokenizer sees them. A tokenizer whose
`canonical` is True does so too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from edje_index.errors import ModelError
from edje_index.filesystem import write_json
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.safety import check_tokenizer_folder

IMAGE_TOKEN = "<image>"
MAX_TEXT_TOKENS = 64  # [CLS], caption and both [SEP]
NUM_SPECIAL_TOKENS = 3
SPECIAL_TOKEN_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


@dataclass(frozen=True)
class JointInputs:
    """int64 tensors [b, t]; short rows are padded."""

    input_ids: torch.Tensor
    token_type_ids: torch.Tensor
    attention_mask: torch.Tensor


class JointTokenizer:
    """A BERT tokenizer with the ``<image>`` placeholder.

    Attributes:
        tokenizer: the tokenizer of transformers.
        canonical: whether captions are canonicalised first, see `canonical_caption`.
        image_token_id: token id of the placeholder.
    """

    def __init__(self, tokenizer: Any, *, canonical: bool = False) -> None:
        self.tokenizer = tokenizer
        self.canonical = canonical
        self.image_token_id = int(tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))

    def __len__(self) -> int:
        return len(self.tokenizer)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into ``folder``.

        Equal tokenizers give equal bytes, whatever their origin, their use and the version of transformers, because
        the fingerprint of a bundle covers these files.
        """
        self.tokenizer.backend_tokenizer.no_truncation()
        self.tokenizer.backend_tokenizer.no_padding()
        self.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        special = {name: getattr(self.tokenizer, name) for name in SPECIAL_TOKEN_NAMES}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "truncation_side": self.tokenizer.truncation_side}
        write_json(folder / "tokenizer_config.json", {**special, **settings})

    def inputs(self, captions: Sequence[str], image_tokens: int) -> JointInputs:
        """One row per caption, each with ``image_tokens`` placeholders."""
        return self.inputs_of_ids(self.caption_ids(captions), image_tokens)

    def inputs_of_ids(self, texts: Sequence[Sequence[int]], image_tokens: int) -> JointInputs:
        """As `inputs`, given the token ids of each caption."""
        image = [self.image_token_id] * image_tokens
        length = max(map(len, texts)) + NUM_SPECIAL_TOKENS + image_tokens
        ids = torch.full((len(texts), length), self.tokenizer.pad_token_id, dtype=torch.int64)
        types = torch.zeros_like(ids)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            tokens = [self.tokenizer.cls_token_id, *text, self.tokenizer.sep_token_id, *image]
            tokens.append(self.tokenizer.sep_token_id)
            ids[row, : len(tokens)] = torch.tensor(tokens)
            types[row, len(text) + 2 : len(tokens)] = 1
            mask[row, : len(tokens)] = 1
        return JointInputs(ids, types, mask)

    def caption_ids(self, captions: Sequence[str]) -> list[list[int]]:
        """Token ids of each caption, truncated. "<image>" in a caption is an unknown token, not a placeholder."""
        encoded = self.tokenizer(
            [canonical_caption(caption) for caption in captions] if self.canonical else list(captions),
            add_special_tokens=False,
            padding=False,
            truncation=True,
            max_length=MAX_TEXT_TOKENS - NUM_SPECIAL_TOKENS,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        unknown = self.tokenizer.unk_token_id
        return [[unknown if i == self.image_token_id else i for i in ids] for ids in encoded["input_ids"]]


@lru_cache(maxsize=4096)  # the candidates of a query share its caption
def canonical_caption(text: str) -> str:
    """`text` as the published code hands it to the tokenizer: repaired, in lower case and without punctuation.

    Broken encodings are repaired and HTML entities are resolved first.
    """
    prepare_torchvision()
    from open_clip.tokenizer import basic_clean, canonicalize_text

    canonical: str = canonicalize_text(basic_clean(text))
    return canonical


def load_joint_tokenizer(folder: Path, *, canonical: bool = False) -> JointTokenizer:
    """Read a BERT tokenizer, and add the ``<image>`` placeholder if it is missing.

    Args:
        folder: its directory.
        canonical: see `JointTokenizer`.

    Raises:
        ModelError: the folder holds no BERT tokenizer, or one with code.
    """
    prepare_torchvision()
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ModelError(
            f"no tokenizer folder at {folder}: give a folder with tokenizer.json (or vocab.txt) and config.json"
        )
    check_tokenizer_folder(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot read the tokenizer in {folder}: {' '.join(str(error).split())[:300]}") from error
    if IMAGE_TOKEN not in tokenizer.get_vocab():
        tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None or tokenizer.pad_token_id is None:
        raise ModelError(f"the tokenizer in {folder} is not a BERT tokenizer: it has no [CLS], [SEP] or [PAD]")
    return JointTokenizer(tokenizer, canonical=canonical)
