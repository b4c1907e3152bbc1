"""Makes the input of the joint encoder, ``[CLS] caption [SEP] <image> x m [SEP]``, as
in the published EDJE code.

Tokens up to the first ``[SEP]`` have token type 0. Later tokens have token type 1.
Captions are truncated so that a row has at most 64 + m tokens.

This module also cleans texts before tokenisation as open_clip does, without importing
open_clip.
"""

from __future__ import annotations

import html
import itertools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from edje_index.errors import ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.filesystem import write_json
from edje_index.models.safety import check_tokenizer_folder, read_configuration
from edje_index.models.weights import one_line

IMAGE_TOKEN = "<image>"
# largest number of tokens per row, without image tokens: [CLS], caption and two [SEP]
MAX_TEXT_TOKENS = 64
NUM_SPECIAL_TOKENS = 3
MAX_CAPTION_TOKENS = MAX_TEXT_TOKENS - NUM_SPECIAL_TOKENS
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
# the tokenizer class that `JointTokenizer.save` writes
OWN_CLASS = "PreTrainedTokenizerFast"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
SPECIAL_TOKEN_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


class JointInputs(NamedTuple):
    """b input rows of the joint encoder. All fields are int64 [b, t]. Shorter rows
    are padded to t tokens.
    """

    input_ids: Tensor
    token_type_ids: Tensor
    attention_mask: Tensor


@dataclass(eq=False)
class JointTokenizer:
    """A BERT tokenizer with the ``<image>`` placeholder.

    Attributes:
        special_tokens: text of each special token, such as ``[SEP]``, by the names in
            `SPECIAL_TOKEN_NAMES`.
        truncation_side: side on which long captions are truncated, "right" or "left".
        canonical: True if captions are converted to lower case without punctuation
            before they are tokenised, see `clean_canonicalize`.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    truncation_side: str = "right"
    canonical: bool = False

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer
        # This call changes nothing if the vocabulary already contains the token.
        tokenizer.add_special_tokens([IMAGE_TOKEN])
        # A tokenizer file may switch on truncation and padding, which are not wanted.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._special_ids: dict[str, int] = {}
        for name, token in self.special_tokens.items():
            token_id = tokenizer.token_to_id(token)
            if token_id is None:
                raise ModelError(
                    f"the tokenizer lacks the special token {token}: give the files of"
                    " a BERT tokenizer"
                )
            self._special_ids[name] = token_id
        image_token_id = tokenizer.token_to_id(IMAGE_TOKEN)
        assert image_token_id is not None
        self.image_token_id = image_token_id

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def check_fits(self, words: int) -> None:
        """Raise ModelError if the token id of the ``<image>`` placeholder is out of
        range for a language model with `words` token ids.
        """
        if self.image_token_id >= words:
            raise ModelError(
                f"the token id {self.image_token_id} of <image> is out of range,"
                f" because the language model has only {words} token ids: use the"
                " tokenizer of the language model"
            )

    def special_id(self, name: str) -> int:
        """Return the token id of a special token. `name` is one of
        `SPECIAL_TOKEN_NAMES`.
        """
        return self._special_ids[name]

    def save(self, folder: Path) -> None:
        """Write the tokenizer files into ``folder``. Equal tokenizers give equal
        files.
        """
        # The files must be equal, because the fingerprint of a bundle covers them.
        self.tokenizer.save(str(folder / TOKENIZER_FILE))
        settings = {
            "tokenizer_class": OWN_CLASS,
            "truncation_side": self.truncation_side,
        }
        write_json(folder / TOKENIZER_SETTINGS, {**self.special_tokens, **settings})

    def inputs(self, captions: Sequence[str], image_tokens: int) -> JointInputs:
        """Return one input row per caption. Each row has ``image_tokens``
        placeholders.
        """
        return self.inputs_of_ids(self.caption_ids(captions), image_tokens)

    def inputs_of_ids(
        self, texts: Sequence[Sequence[int]], image_tokens: int | None
    ) -> JointInputs:
        """Return one input row per caption, like `inputs`. ``texts`` contains the token
        ids of each caption. If ``image_tokens`` is None, a row is ``[CLS] caption
        [SEP]``, without a second separator.
        """
        pad, start, separator = map(
            self.special_id, ("pad_token", "cls_token", "sep_token")
        )
        lengths = np.array([[len(text)] for text in texts])
        # `end` is the position of the last [SEP] of each row.
        end = lengths + 1 if image_tokens is None else lengths + 2 + image_tokens
        ids = np.full((len(texts), int(end.max()) + 1), pad, dtype=np.int64)
        position = np.arange(ids.shape[1])
        mask = position <= end
        types = mask & (position >= lengths + 2)
        ids[:, 0] = start
        ids[(position >= 1) & (position <= lengths)] = list(
            itertools.chain.from_iterable(texts)
        )
        ids[types] = self.image_token_id
        ids[(position == lengths + 1) | (position == end)] = separator
        return JointInputs(
            *(
                torch.from_numpy(array.astype(np.int64, copy=False))
                for array in (ids, types, mask)
            )
        )

    def caption_ids(
        self, captions: Sequence[str], longest: int = MAX_CAPTION_TOKENS
    ) -> list[list[int]]:
        """Return the token ids of each caption, without special tokens, truncated to
        `longest` tokens.

        A caption that occurs several times is tokenised once.
        """
        distinct = list(dict.fromkeys(captions))
        texts = (
            [clean_canonicalize(caption) for caption in distinct]
            if self.canonical
            else distinct
        )
        with tokenizing():
            encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        # A caption may contain the text "<image>". It must not become a placeholder.
        unknown = self.special_id("unk_token")
        placeholder = self.image_token_id
        ids = [
            [
                unknown if i == placeholder else i
                for i in self.truncated(each.ids, longest)
            ]
            for each in encoded
        ]
        ids_of_caption = dict(zip(distinct, ids, strict=True))
        return [ids_of_caption[caption] for caption in captions]

    def truncated(self, ids: list[int], longest: int = MAX_CAPTION_TOKENS) -> list[int]:
        """Truncate the token ids of a caption to `longest` ids, on the side
        `truncation_side`.
        """
        return ids[-longest:] if self.truncation_side == "left" else ids[:longest]


@contextmanager
def tokenizing() -> Iterator[None]:
    """Context manager for calls of a tokenizer. It raises ModelError if the tokenizer
    cannot split a text.
    """
    try:
        yield
    except BaseException as error:
        # If a regular expression takes too long, the tokenizers library panics. The
        # class of this exception cannot be imported, so its name is compared.
        if type(error).__name__ != "PanicException":
            raise
        raise ModelError(
            f"the tokenizer cannot split a text: {error}; use another tokenizer"
        ) from error


def load_joint_tokenizer(folder: Path, *, canonical: bool = False) -> JointTokenizer:
    """Read the BERT tokenizer in `folder`. If its vocabulary lacks the ``<image>``
    placeholder, the placeholder is added. `canonical` sets `JointTokenizer.canonical`.

    Raises:
        ModelError: the folder contains no BERT tokenizer that can be read.
    """
    if not folder.is_dir():
        raise ModelError(
            f"there is no directory {folder}: give a directory that contains"
            " config.json and either tokenizer.json or vocab.txt"
        )
    check_tokenizer_folder(folder)
    file = folder / TOKENIZER_FILE
    settings_file = folder / TOKENIZER_SETTINGS
    try:
        settings = (
            read_configuration(settings_file)
            if file.is_file() and settings_file.is_file()
            else {}
        )
        if set(settings) == {
            *SPECIAL_TOKEN_NAMES,
            "tokenizer_class",
            "truncation_side",
        }:
            # `JointTokenizer.save` wrote these files, so they can be read without
            # transformers.
            return JointTokenizer(
                Tokenizer.from_file(str(file)),
                {name: str(settings[name]) for name in SPECIAL_TOKEN_NAMES},
                truncation_side=str(settings["truncation_side"]),
                canonical=canonical,
            )
        prepare_torchvision()
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        special_tokens = {
            name: getattr(tokenizer, name) for name in SPECIAL_TOKEN_NAMES
        }
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or None in special_tokens.values():
            raise ModelError(
                "the tokenizer lacks one of [CLS], [SEP], [PAD], [UNK] and [MASK]: give"
                " the files of a BERT tokenizer"
            )
        return JointTokenizer(
            backend,
            special_tokens,
            truncation_side=tokenizer.truncation_side,
            canonical=canonical,
        )
    except Exception as error:
        raise ModelError(
            f"cannot read the tokenizer in {folder}: {one_line(error)}; copy the"
            " directory again"
        ) from error


def clean_whitespace(text: str) -> str:
    """Repair broken encodings, decode HTML entities, and replace every run of
    whitespace by one space.
    """
    return " ".join(_repaired(text).split())


def clean_canonicalize(text: str) -> str:
    """Clean `text` like `clean_whitespace`, convert it to lower case, and remove
    punctuation.
    """
    plain = _repaired(text).replace("_", " ").translate(_NO_PUNCTUATION)
    return " ".join(plain.lower().split())


def _repaired(text: str) -> str:
    # ftfy is imported here, because only some bundles need it.
    import ftfy

    return html.unescape(html.unescape(ftfy.fix_text(text)))


CLEANERS: Final[dict[str, Callable[[str], str]]] = {
    "whitespace": clean_whitespace,
    "lower": lambda text: clean_whitespace(text).lower(),
    "canonicalize": clean_canonicalize,
}
"""Functions that clean a text before tokenisation, by their names in open_clip."""
