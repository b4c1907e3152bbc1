"""The frozen text tower: L2-normalised text embeddings in the space of the image embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edje_index.errors import HubUnreachableError, ModelError
from edje_index.filesystem import write_json
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.clip_model import ClipConfig
from edje_index.models.hub import hub_access
from edje_index.models.safety import check_options, check_tokenizer_folder
from edje_index.progress import OnProgress

prepare_torchvision()

from open_clip.hf_model import HFTextEncoder  # noqa: E402
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer  # noqa: E402

TOKENIZER_SETTINGS = "tokenizer_config.json"
ORIGIN_KEYS = ("is_local", "local_files_only", "name_or_path")  # where a tokenizer was read from
HF_OPTIONS = ("clean", "language", "strip_sep_token")  # accepted tokenizer_kwargs
SIMPLE_OPTIONS = ("additional_special_tokens", "clean", "reduction_mask")
DEFAULT_CONTEXT_LENGTH = 77  # open_clip's default
TEXTS_PER_REPORT = 1024


class TextTower:
    """The text tower of an open_clip model, with its tokenizer.

    Example:
        >>> from edje_index import ModelBundle
        >>> ModelBundle.load("model").text.encode(["a dog", "two cats"]).shape
        (2, 24)
    """

    def __init__(self, clip: torch.nn.Module, tokenizer: Any) -> None:
        self.clip = clip
        self.tokenizer = tokenizer

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], batch_size: int = 256) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Embeddings of ``texts``: float32 [len(texts), embed_dim], L2-normalised rows."""
        if isinstance(texts, str) or not texts:
            raise ValueError("texts must be a list of at least one string")
        device = next(self.clip.parameters()).device
        # Texts of similar length share a batch, so that little padding is computed.
        order = sorted(range(len(texts)), key=lambda position: len(texts[position]))
        parts = []
        for start in range(0, len(texts), batch_size):
            batch = [texts[position] for position in order[start : start + batch_size]]
            ids = self._without_padding(self.tokenizer(batch))
            parts.append(self.clip.encode_text(ids.to(device), normalize=True).float().cpu())  # type: ignore[operator]
        result = np.empty((len(texts), parts[0].shape[1]), dtype=np.float32)
        result[order] = torch.cat(parts).numpy()
        return result

    def _without_padding(self, ids: torch.Tensor) -> torch.Tensor:
        """Trim token ids [b, t] to the longest row if the tower masks padding; open_clip's own towers do not."""
        text = getattr(self.clip, "text", None)
        if not isinstance(text, HFTextEncoder):
            return ids
        longest = int((ids != text.config.pad_token_id).sum(dim=1).max())
        return ids[:, : max(1, longest)]


def embed_texts(
    tower: TextTower,
    texts: Sequence[str],
    on_progress: OnProgress,
    *,
    texts_per_report: int = TEXTS_PER_REPORT,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Embeddings of many texts, float32 [len(texts), embed_dim]. Equal texts are embedded once.

    Args:
        tower: the text tower.
        texts: at least one.
        on_progress: called before each part and at the end; it may raise to stop.
        texts_per_report: number of texts between two reports.
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


def text_tokenizer(config: ClipConfig, folder: Path | None = None) -> Any:
    """The tokenizer that a configuration names: open_clip's own, or a Hugging Face one.

    Args:
        config: configuration of the whole model.
        folder: folder with the files of a Hugging Face tokenizer; by default they come from the hub.

    Raises:
        HubUnreachableError: the files are not in the local cache and cannot be downloaded.
        ModelError: the folder holds no tokenizer, or the configuration asks for one that is not accepted.
    """
    name = config.text.get("hf_tokenizer_name")
    options = dict(config.text.get("tokenizer_kwargs") or {})
    check_options(options, HF_OPTIONS if name else SIMPLE_OPTIONS, f"the configuration of {config.name}")
    options["context_length"] = int(config.text.get("context_length", DEFAULT_CONTEXT_LENGTH))
    if not name:
        return SimpleTokenizer(**options)
    if folder is not None:
        check_tokenizer_folder(folder)
    options |= {"tokenizer_mode": config.text.get("tokenizer_mode"), "trust_remote_code": False}
    try:
        with hub_access(local_only=folder is not None):
            return HFTokenizer(str(folder or name), **options)
    except Exception as error:
        detail = " ".join(str(error).split())[:300]
        if folder or Path(name).exists():
            raise ModelError(f"cannot read the text tower's tokenizer in {folder or name}: {detail}") from error
        raise HubUnreachableError(
            f"cannot download the text tokenizer {name}: give the folder of its files, or fill the hub's cache "
            f"(HF_HOME) on a machine that reaches the hub and copy it here [{detail}]"
        ) from error


def save_text_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files of a Hugging Face tokenizer without traces of its use and origin.

    open_clip's own tokenizer has no files.
    """
    if not isinstance(tokenizer, HFTokenizer):
        return
    backend = getattr(tokenizer.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    tokenizer.save_pretrained(str(folder))
    settings = json.loads((folder / TOKENIZER_SETTINGS).read_text(encoding="utf-8"))
    write_json(folder / TOKENIZER_SETTINGS, {k: v for k, v in settings.items() if k not in ORIGIN_KEYS})
