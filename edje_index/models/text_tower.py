"""Text towers, which compute the embeddings of texts.

`TextTower` runs the text tower of any open_clip model. `BertTextTower` runs a BERT text
tower without open_clip and transformers, because importing these two libraries takes
longer than a search. The embeddings of both classes are equal up to rounding.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from edje_index.errors import HubUnreachableError, ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.bert import Bert, BertWeights
from edje_index.models.clip_config import (
    HF_CONFIG_FILE,
    HF_TEXT_FOLDER,
    WEIGHTS_FILE,
    ClipConfig,
)
from edje_index.models.devices import inference
from edje_index.models.filesystem import write_json
from edje_index.models.joint_inputs import (
    CLEANERS,
    TOKENIZER_FILE,
    TOKENIZER_SETTINGS,
    clean_canonicalize,
    tokenizing,
)
from edje_index.models.safety import check_tokenizer_folder, read_configuration
from edje_index.models.weights import one_line, read_weights
from edje_index.progress import OnProgress
from storage_formats.arguments import repr_of
from storage_formats.arrays import Floats

# Settings that say where a tokenizer was read from. They are not written to files.
ORIGIN_KEYS = ("is_local", "local_files_only", "name_or_path")
# accepted keys of `tokenizer_kwargs`, for tokenizers of Hugging Face and of open_clip
HF_OPTIONS = ("clean", "language", "strip_sep_token")
SIMPLE_OPTIONS = ("additional_special_tokens", "clean", "reduction_mask")
# keys of `tokenizer_kwargs`, and tokenizer classes, that `BertTextTower` supports
_TOKENIZER_OPTIONS = frozenset({"clean"})
_TOKENIZER_CLASSES = frozenset({"BertTokenizer", "BertTokenizerFast"})


class TextEncoder(ABC):
    """Maps texts to L2-normalised embeddings in the space of the image embeddings.

    Attributes:
        canonical: True if texts are first converted to lower case without punctuation.
            It is set if the joint encoder of the same bundle converts its captions in
            this way.
    """

    canonical = False

    @abstractmethod
    def embed(self, texts: list[str]) -> Tensor:
        """Return the L2-normalised embeddings of one batch of texts, float32
        [len(texts), embed_dim].
        """

    @inference()
    def encode(
        self,
        texts: Sequence[str],
        batch_size: int = 256,
        on_progress: OnProgress = lambda activity, done, total: None,
    ) -> Floats:
        """Return the L2-normalised embeddings of ``texts``, float32 [len(texts),
        embed_dim]. Equal texts are embedded once.

        Args:
            on_progress: called before each batch and at the end with the name of the
                activity, the number of embedded texts, and the number of distinct
                texts. An exception raised by `on_progress` stops this method.

        Raises:
            ValueError: `texts` is empty, or is one string instead of a list.
        """
        if isinstance(texts, str) or not texts:
            raise ValueError("texts must be a list of at least one string")
        # Texts of similar length share a batch, so that batches have little padding.
        distinct = sorted(dict.fromkeys(texts), key=len)
        parts = []
        for start in range(0, len(distinct), batch_size):
            on_progress("embedding texts", start, len(distinct))
            batch = distinct[start : start + batch_size]
            if self.canonical:
                batch = list(map(clean_canonicalize, batch))
            parts.append(self.embed(batch).float().cpu())
        on_progress("embedding texts", len(distinct), len(distinct))
        row_of_text = {text: row for row, text in enumerate(distinct)}
        rows = [row_of_text[text] for text in texts]
        embeddings: Floats = torch.cat(parts).numpy()[rows]
        return embeddings


@dataclass(eq=False, repr=False)
class TextTower(TextEncoder):
    """The frozen text tower of an open_clip model, with a tokenizer.

    Examples:
        >>> from edje_index import ModelBundle
        >>> ModelBundle.load("model").text.encode(["a dog", "two cats"]).shape
        (2, 24)
    """

    clip: nn.Module
    tokenizer: Any

    __repr__ = repr_of("clip.__class__.__name__")

    def embed(self, texts: list[str]) -> Tensor:
        with tokenizing():
            ids = self.tokenizer(texts)
        embeddings: Tensor = self.clip.encode_text(  # type: ignore[operator]
            ids.to(next(self.clip.parameters()).device), normalize=True
        )
        return embeddings


def text_tokenizer(config: ClipConfig, folder: str | Path | None = None) -> Any:
    """Load the tokenizer of a text tower.

    Args:
        config: configuration of the open_clip model. It names the tokenizer.
        folder: folder with the files of a Hugging Face tokenizer. None downloads these
            files from the hub.

    Raises:
        HubUnreachableError: the files are not in the local cache and cannot be
            downloaded.
        ModelError: the folder contains no tokenizer, or the configuration names a
            tokenizer that is not accepted.
    """
    prepare_torchvision()
    from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

    from edje_index.models.clip_model import hub_access

    name = config.text.get("hf_tokenizer_name")
    options = dict(config.text.get("tokenizer_kwargs") or {})
    accepted = HF_OPTIONS if name else SIMPLE_OPTIONS
    if refused := sorted(set(options) - set(accepted)):
        raise ModelError(
            f"the configuration of {config.name} gives the tokenizer the option"
            f" {refused[0]!r}, which is not accepted: use only {', '.join(accepted)}"
        )
    options["context_length"] = config.context_length
    if not name:
        return SimpleTokenizer(**options)
    if folder is not None:
        check_tokenizer_folder(Path(folder))
    options |= {
        "tokenizer_mode": config.text.get("tokenizer_mode"),
        "trust_remote_code": False,
    }
    try:
        with hub_access(local_only=folder is not None):
            return HFTokenizer(str(folder or name), **options)
    except Exception as error:
        if folder or Path(name).exists():
            raise ModelError(
                f"cannot read the tokenizer of the text tower in {folder or name}:"
                f" {one_line(error)}; copy its files again"
            ) from error
        raise HubUnreachableError(
            f"cannot download the text tokenizer {name} ({one_line(error)}): give a"
            " directory with the tokenizer files, or copy the directory HF_HOME from a"
            " machine that has downloaded this tokenizer"
        ) from error


def save_text_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files of a Hugging Face tokenizer to `folder`. Equal tokenizers
    give equal files.
    """
    # Nothing is written for open_clip's own tokenizer, which has no files.
    from open_clip.tokenizer import HFTokenizer

    if not isinstance(tokenizer, HFTokenizer):
        return
    backend = getattr(tokenizer.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    tokenizer.save_pretrained(str(folder))
    settings = json.loads((folder / TOKENIZER_SETTINGS).read_text(encoding="utf-8"))
    write_json(
        folder / TOKENIZER_SETTINGS,
        {k: v for k, v in settings.items() if k not in ORIGIN_KEYS},
    )


@dataclass(eq=False)
class BertTextTower(TextEncoder):
    """A BERT text tower. The embedding of a text is the mean of the last hidden states,
    projected to the width e.

    Texts get the same cleaning, special tokens and truncation as in open_clip.
    """

    _bert: Bert
    _tokenizer: Tokenizer
    _clean: Callable[[str], str]
    _pad: int
    _projection: tuple[Tensor, Tensor]

    def embed(self, texts: list[str]) -> Tensor:
        with tokenizing():
            encoded = self._tokenizer.encode_batch(list(map(self._clean, texts)))
        ids = torch.tensor([each.ids for each in encoded])
        ids = ids.to(self._bert.words.device)
        types = torch.zeros_like(ids)
        pooled = self._bert.sentence_vectors(ids, types, ids != self._pad)
        inner, outer = self._projection
        pooled = functional.gelu(functional.linear(pooled, inner))
        return functional.normalize(functional.linear(pooled, outer), dim=-1)


def load_bert_text_tower(
    folder: Path, config: ClipConfig, device: torch.device
) -> BertTextTower | None:
    """Load the text tower from `folder`, the folder ``vision/`` of a bundle. Return
    None if `BertTextTower` does not support this text tower.
    """
    text = config.text
    options = text.get("tokenizer_kwargs") or {}
    clean = CLEANERS.get(str(options.get("clean", "whitespace")))
    source = folder / HF_TEXT_FOLDER / HF_CONFIG_FILE
    path = folder / WEIGHTS_FILE
    if (
        not text.get("hf_model_name")
        or not text.get("hf_tokenizer_name")
        or text.get("hf_pooler_type") != "mean_pooler"
        or text.get("hf_proj_type") != "mlp"
        or text.get("tokenizer_mode")
        or clean is None
        or not set(options) <= _TOKENIZER_OPTIONS
        or not all(
            file.is_file()
            for file in (source, folder / TOKENIZER_SETTINGS, folder / TOKENIZER_FILE)
        )
    ):
        return None
    bert_config = read_configuration(source)
    config.check_context_length(bert_config)
    check_tokenizer_folder(folder)
    settings = read_configuration(folder / TOKENIZER_SETTINGS)
    sides = {
        settings.get("truncation_side", "right"),
        settings.get("padding_side", "right"),
    }
    if (
        settings.get("tokenizer_class") not in _TOKENIZER_CLASSES
        or sides != {"right"}
        or bert_config.get("model_type") != "bert"
    ):
        return None
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        tokenizer.enable_truncation(max_length=config.context_length)
        pad = int(bert_config.get("pad_token_id", 0))
        tokenizer.enable_padding(pad_id=pad)
    except Exception as error:
        # The tokenizers library raises exceptions of the class Exception.
        raise ModelError(
            f"cannot read the tokenizer of the text tower in {folder}: {error}; copy"
            " the tokenizer files again"
        ) from error
    tensors = read_weights(path, prefix="text.")
    weights = BertWeights(tensors, "transformer.", source=str(path), device=device)
    bert = Bert(bert_config, weights, source=str(source))
    head = replace(weights, prefix="proj.")
    inner = (bert.width + config.embed_dim) // 2
    projection = (
        head.take("0.weight", inner, bert.width),
        head.take("2.weight", config.embed_dim, inner),
    )
    return BertTextTower(bert, tokenizer, clean, pad, projection)
