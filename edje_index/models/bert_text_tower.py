"""Text towers that are BERT models, without open_clip and transformers.

Importing these two libraries takes longer than a search. Up to rounding, the embeddings equal the embeddings from
open_clip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from edje_index.errors import ModelError
from edje_index.models.bert import Bert, BertShape, BertWeights
from edje_index.models.clip_config import HF_CONFIG_FILE, HF_TEXT_FOLDER, WEIGHTS_FILE, ClipConfig
from edje_index.models.joint_inputs import TOKENIZER_FILE, TOKENIZER_SETTINGS
from edje_index.models.safety import check_tokenizer_folder, read_configuration
from edje_index.models.text_cleaning import CLEANERS
from edje_index.models.text_encoder import TextEncoder
from edje_index.models.weights import read_weights

_PREFIX = "text."
_MLP, _LINEAR = "mlp", "linear"
_TOKENIZER_OPTIONS = frozenset({"clean"})  # supported options of open_clip's tokenizer
_TOKENIZER_CLASSES = frozenset({"BertTokenizer", "BertTokenizerFast"})


@dataclass(frozen=True)
class _TextInputs:
    """Converts texts to token ids, with the same cleaning, special tokens and truncation as open_clip."""

    tokenizer: Tokenizer
    clean: Callable[[str], str]
    pad: int

    def __call__(self, texts: list[str]) -> torch.Tensor:
        """Return the token ids of b texts, int64 [b, t], padded to the longest text."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch([self.clean(text) for text in texts])]
        ids = torch.full((len(rows), max(map(len, rows))), self.pad, dtype=torch.int64)
        for position, row in enumerate(rows):
            ids[position, : len(row)] = torch.tensor(row, dtype=torch.int64)
        return ids


class BertTextTower(TextEncoder):
    """A BERT text tower. The embedding of a text is the mean of the last hidden states, projected to the width e."""

    def __init__(self, bert: Bert, inputs: _TextInputs, projection: list[torch.Tensor]) -> None:
        """Private. Call `load_bert_text_tower` instead."""
        self._bert, self._inputs, self._projection = bert, inputs, projection

    def embed(self, texts: list[str]) -> torch.Tensor:
        ids = self._inputs(texts).to(self._bert.words.device)
        mask = ids != self._inputs.pad
        words = functional.embedding(ids, self._bert.words)
        embedded = self._bert.embed(words, torch.zeros_like(ids))
        hidden = self._bert.hidden_states(embedded, None if bool(mask.all()) else mask)
        pooled = (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        for matrix in self._projection[:-1]:
            pooled = functional.gelu(functional.linear(pooled, matrix))
        return functional.normalize(functional.linear(pooled, self._projection[-1]), dim=-1)


def load_bert_text_tower(folder: Path, config: ClipConfig, device: torch.device) -> BertTextTower | None:
    """Load the text tower from the folder ``vision/`` of a bundle. Return None if the text tower is not supported.

    Raises:
        ModelError: a file cannot be read, a configuration names code to run, or the weights do not fit the
            configuration.
    """
    text = config.text
    if not _is_supported(text) or not (folder / HF_TEXT_FOLDER / HF_CONFIG_FILE).is_file():
        return None
    source = folder / HF_TEXT_FOLDER / HF_CONFIG_FILE
    bert_config = read_configuration(source)
    inputs = _text_inputs(folder, text, bert_config)
    if inputs is None or bert_config.get("model_type") != "bert":
        return None
    path = folder / WEIGHTS_FILE
    tensors = read_weights(path, prefix=_PREFIX)
    weights = BertWeights(tensors, "transformer.", source=str(path), device=device)
    bert = Bert(BertShape.parse(bert_config, str(source)), weights)
    head = BertWeights(tensors, "proj.", source=str(path), device=device)
    if text["hf_proj_type"] == _LINEAR:
        return BertTextTower(bert, inputs, [head.take("weight", config.embed_dim, bert.width)])
    inner = (bert.width + config.embed_dim) // 2
    return BertTextTower(
        bert, inputs, [head.take("0.weight", inner, bert.width), head.take("2.weight", config.embed_dim, inner)]
    )


def _is_supported(text: Mapping[str, Any]) -> bool:
    return (
        bool(text.get("hf_model_name"))
        and bool(text.get("hf_tokenizer_name"))
        and text.get("hf_pooler_type") == "mean_pooler"
        and text.get("hf_proj_type") in (_MLP, _LINEAR)
        and not text.get("tokenizer_mode")
        and set(text.get("tokenizer_kwargs") or {}) <= _TOKENIZER_OPTIONS
    )


def _text_inputs(folder: Path, text: Mapping[str, Any], bert_config: Mapping[str, Any]) -> _TextInputs | None:
    """Load the tokenizer from `folder`. Return None if the tokenizer is not supported."""
    settings_file, file = folder / TOKENIZER_SETTINGS, folder / TOKENIZER_FILE
    if not settings_file.is_file() or not file.is_file():
        return None
    check_tokenizer_folder(folder)
    settings = read_configuration(settings_file)
    clean = CLEANERS.get((text.get("tokenizer_kwargs") or {}).get("clean", "whitespace"))
    sides = {settings.get("truncation_side", "right"), settings.get("padding_side", "right")}
    if settings.get("tokenizer_class") not in _TOKENIZER_CLASSES or clean is None or sides != {"right"}:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.enable_truncation(max_length=int(text.get("context_length", 77)))
        tokenizer.no_padding()
        return _TextInputs(tokenizer, clean, int(bert_config.get("pad_token_id", 0)))
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise ModelError(
            f"cannot read the tokenizer of the text tower in {folder}: {error}; copy the tokenizer files again"
        ) from error
