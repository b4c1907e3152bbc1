"""Checks that the files of a model hold only data, so that loading them runs no foreign code.

transformers runs Python files named under ``auto_map`` and downloads kernels named under ``attn_implementation``. timm
downloads models with names like ``hf-hub:ORG/REPO``. This module refuses all of these.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from edje_index.errors import ModelError

CODE_SUFFIXES = frozenset({".dll", ".pickle", ".pkl", ".py", ".pyc", ".so"})
CODE_KEYS = frozenset({"auto_map", "custom_pipelines", "trust_remote_code"})
IMPLEMENTATION_KEYS = frozenset({"_attn_implementation", "attn_implementation", "experts_implementation"})
WEIGHT_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".safetensors"})
MAX_TEXT_BYTES = 256 << 20  # tokenizers of 256,000 words take 35 MB
TOKENIZER_CLASSES = frozenset({
    "BertTokenizer", "CLIPTokenizer", "DistilBertTokenizer", "GemmaTokenizer", "M2M100Tokenizer", "MPNetTokenizer",
    "NllbTokenizer", "PreTrainedTokenizer", "RobertaTokenizer", "SiglipTokenizer", "T5Tokenizer", "TokenizersBackend",
    "XLMRobertaTokenizer",
})  # fmt: skip


def check_bundle_folder(folder: Path, files: Iterable[str]) -> None:
    """Raise ModelError if a bundle holds or names code, or lists files outside the bundle.

    `files` are the names of the files listed in ``bundle.json``. FIFOs, devices and very large files that hold no
    weights are refused too.
    """
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ModelError(
                f"the bundle {folder} lists the file {name!r} outside its directory: do not use this bundle"
            )
    for file in sorted(folder.rglob("*")):
        _check_kind(file)
        if file.suffix in CODE_SUFFIXES:
            raise ModelError(
                f"{file} is code, but a bundle may hold only data: remove this file, or do not use the bundle"
            )
        if file.name.endswith("config.json") and file.is_file():
            read_configuration(file)


def _check_kind(file: Path) -> None:
    """Refuse FIFOs and devices, because reading them may never end, and large files without weights."""
    try:
        status = file.stat()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}; restore the file, or do not use the bundle") from error
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{file} is not a regular file: remove {file.name}, or do not use the bundle")
    if file.suffix not in WEIGHT_SUFFIXES and status.st_size > MAX_TEXT_BYTES:
        raise ModelError(
            f"{file} has {status.st_size} bytes, too many for a configuration or tokenizer: do not use the bundle"
        )


def read_configuration(file: Path) -> dict[str, Any]:
    """Read a JSON configuration file, which must not name code to run or to download.

    Raises:
        ModelError: the file cannot be read, is not a JSON object, or names code.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {error}; restore this file") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object, but holds a {type(content).__name__}: restore this file")
    for key, value in _items(content):
        names_hub_code = key in IMPLEMENTATION_KEYS and "/" in str(value)
        if (key in CODE_KEYS and value) or names_hub_code:
            raise ModelError(f"{file} asks to run code ({key!r}: {value!r}): remove this key, or do not use the model")
    return content


def check_tokenizer_folder(folder: Path) -> None:
    """Raise ModelError if a tokenizer configuration names code or an unknown tokenizer class."""
    for name in ("tokenizer_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        tokenizer_class = read_configuration(file).get("tokenizer_class")
        if tokenizer_class and str(tokenizer_class).removesuffix("Fast") not in TOKENIZER_CLASSES:
            raise ModelError(
                f"{file} names the tokenizer class {tokenizer_class!r}, which is not accepted: use one of "
                f"{', '.join(sorted(TOKENIZER_CLASSES))}"
            )


def check_options(options: Mapping[str, Any], accepted: Collection[str], source: str) -> None:
    """Raise ModelError if a tokenizer option is not in `accepted`. `source` names the file."""
    refused = sorted(set(options) - set(accepted))
    if refused:
        raise ModelError(
            f"{source} gives the tokenizer the option {refused[0]!r}, which is not accepted: use only "
            f"{', '.join(sorted(accepted))}"
        )


def check_local_name(name: str | None, source: str) -> None:
    """Raise ModelError if a timm model name refers to a hub or a folder. `source` names the file."""
    if name is not None and (":" in name or "/" in name):
        raise ModelError(
            f"{source} names the timm model {name!r}, which is not an architecture of timm: use a name from "
            "timm.list_models()"
        )


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of all objects in the JSON value `value`, at any depth."""
    if isinstance(value, dict):
        yield from value.items()
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _items(child)
