"""Text towers of open_clip models."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from edje_index.errors import HubUnreachableError, ModelError
from edje_index.filesystem import write_json
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.clip_config import ClipConfig
from edje_index.models.clip_model import hub_access
from edje_index.models.safety import check_tokenizer_folder
from edje_index.models.text_encoder import TextEncoder

prepare_torchvision()

from open_clip.hf_model import HFTextEncoder  # noqa: E402
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer  # noqa: E402

TOKENIZER_SETTINGS = "tokenizer_config.json"
ORIGIN_KEYS = ("is_local", "local_files_only", "name_or_path")  # where a tokenizer was read from
HF_OPTIONS = ("clean", "language", "strip_sep_token")  # accepted tokenizer_kwargs
SIMPLE_OPTIONS = ("additional_special_tokens", "clean", "reduction_mask")
DEFAULT_CONTEXT_LENGTH = 77  # open_clip's default


class TextTower(TextEncoder):
    """The frozen text tower of an open_clip model, with a tokenizer.

    Example:
        >>> from edje_index import ModelBundle
        >>> ModelBundle.load("model").text.encode(["a dog", "two cats"]).shape
        (2, 24)
    """

    def __init__(self, clip: torch.nn.Module, tokenizer: Any) -> None:
        self.clip = clip
        self.tokenizer = tokenizer

    def embed(self, texts: list[str]) -> torch.Tensor:
        ids = self.tokenizer(texts)
        text = getattr(self.clip, "text", None)
        if isinstance(text, HFTextEncoder):  # masks padding, so padding after the longest row is not needed
            longest = int((ids != text.config.pad_token_id).sum(dim=1).max())
            ids = ids[:, : max(1, longest)]
        device = next(self.clip.parameters()).device
        embeddings: torch.Tensor = self.clip.encode_text(ids.to(device), normalize=True)  # type: ignore[operator]
        return embeddings


def text_tokenizer(config: ClipConfig, folder: str | Path | None = None) -> Any:
    """Load the tokenizer of a text tower.

    Args:
        config: configuration of the open_clip model. It names the tokenizer.
        folder: folder with the files of a Hugging Face tokenizer. None downloads these files from the hub.

    Raises:
        HubUnreachableError: the files are not in the local cache and cannot be downloaded.
        ModelError: the folder contains no tokenizer, or the configuration names a tokenizer that is not accepted.
    """
    name = config.text.get("hf_tokenizer_name")
    options = dict(config.text.get("tokenizer_kwargs") or {})
    accepted = HF_OPTIONS if name else SIMPLE_OPTIONS
    if refused := sorted(set(options) - set(accepted)):
        raise ModelError(
            f"the configuration of {config.name} gives the tokenizer the option {refused[0]!r}, which is not accepted: "
            f"use only {', '.join(accepted)}"
        )
    options["context_length"] = int(config.text.get("context_length", DEFAULT_CONTEXT_LENGTH))
    if not name:
        return _simple_tokenizer(json.dumps(options))
    if folder is not None:
        check_tokenizer_folder(Path(folder))
    options |= {"tokenizer_mode": config.text.get("tokenizer_mode"), "trust_remote_code": False}
    try:
        with hub_access(local_only=folder is not None):
            return HFTokenizer(str(folder or name), **options)
    except Exception as error:
        detail = " ".join(str(error).split())[:300]
        if folder or Path(name).exists():
            raise ModelError(
                f"cannot read the tokenizer of the text tower in {folder or name}: {detail}; copy its files again"
            ) from error
        raise HubUnreachableError(
            f"cannot download the text tokenizer {name} ({detail}): give a directory with the tokenizer files, or "
            "copy the directory HF_HOME from a machine that has downloaded this tokenizer"
        ) from error


@lru_cache(maxsize=8)
def _simple_tokenizer(options: str) -> SimpleTokenizer:
    """Build open_clip's own tokenizer from its options in JSON. Models share it, because that takes 0.1 s."""
    return SimpleTokenizer(**json.loads(options))


def save_text_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files of a Hugging Face tokenizer to `folder`. Equal tokenizers give equal files."""
    # open_clip's own tokenizer has no files.
    if not isinstance(tokenizer, HFTokenizer):
        return
    backend = getattr(tokenizer.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    tokenizer.save_pretrained(str(folder))
    settings = json.loads((folder / TOKENIZER_SETTINGS).read_text(encoding="utf-8"))
    write_json(folder / TOKENIZER_SETTINGS, {k: v for k, v in settings.items() if k not in ORIGIN_KEYS})
