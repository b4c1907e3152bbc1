"""Checks that the files of a model are data, so that loading a model from a stranger runs no code of theirs.

transformers runs Python files that a configuration names under ``auto_map``, and downloads kernels that one names
under ``attn_implementation``. timm downloads models with names like ``hf-hub:ORG/REPO``. A bundle needs none of these.
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
    """Refuse a bundle that holds code, names code in a configuration, or lists files outside its folder.

    Args:
        folder: the bundle.
        files: names of its files, as ``bundle.json`` lists them.

    Raises:
        ModelError: the bundle does one of these, or holds a FIFO, a device or a very large text file.
    """
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ModelError(f"the bundle {folder} lists the file {name!r}, which is outside its folder: do not use it")
    for file in sorted(folder.rglob("*")):
        _check_kind(file)
        if file.suffix in CODE_SUFFIXES:
            raise ModelError(f"{file} is code, and a bundle holds only data: remove it, or do not use the bundle")
        if file.name.endswith("config.json") and file.is_file():
            read_configuration(file)


def _check_kind(file: Path) -> None:
    """Refuse what never ends when it is read (a FIFO or a device), and large files other than weights."""
    try:
        status = file.stat()
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}; restore the file, or do not use the bundle") from error
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{file} is not a regular file: remove it, or do not use the bundle")
    if file.suffix not in WEIGHT_SUFFIXES and status.st_size > MAX_TEXT_BYTES:
        raise ModelError(
            f"{file} has {status.st_size} bytes, more than a configuration or tokenizer can have: do not use the bundle"
        )


def read_configuration(file: Path) -> dict[str, Any]:
    """Read a configuration file, which must not name code to run or to download.

    Raises:
        ModelError: it names code, or is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a configuration: it holds a JSON {type(content).__name__}, not an object")
    for key, value in _items(content):
        names_hub_code = key in IMPLEMENTATION_KEYS and "/" in str(value)
        if (key in CODE_KEYS and value) or names_hub_code:
            raise ModelError(f"{file} asks to run code ({key!r}: {value!r}): remove the key, or do not use the model")
    return content


def check_tokenizer_folder(folder: Path) -> None:
    """Refuse the configuration of a tokenizer that names code, or a class other than the known ones.

    Raises:
        ModelError: the configuration is refused.
    """
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
    """Refuse options of a tokenizer that are not accepted.

    Raises:
        ModelError: an option is not accepted; the message names it and `source`.
    """
    refused = sorted(set(options) - set(accepted))
    if refused:
        raise ModelError(
            f"{source} gives the tokenizer the option {refused[0]!r}, which is not accepted: use only "
            f"{', '.join(sorted(accepted))}"
        )


def check_local_name(name: str | None, source: str) -> None:
    """Refuse a timm model name that stands for a hub or a folder instead of an architecture.

    Raises:
        ModelError: the name is refused; the message names `source`.
    """
    if name is not None and (":" in name or "/" in name):
        raise ModelError(
            f"{source} names the timm model {name!r}, not one of timm's architectures: use a name of timm.list_models()"
        )


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values of nested JSON objects."""
    if isinstance(value, dict):
        yield from value.items()
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _items(child)
