"""Checks that the files of a model contain only data, so that loading a model runs no
code from these files.

Three kinds of entries in configuration files are refused, because loading the model
would run or download other files:

- ``auto_map`` and similar keys: transformers runs the Python files that they name.
- ``attn_implementation`` and similar keys, if the value names a repository of the hub:
  transformers downloads kernels from it.
- timm models with names like ``hf-hub:ORG/REPO``: timm downloads the model. This check
  is in `clip_config.read_clip_config`.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from edje_index.errors import ModelError
from storage_formats.atomic import Json
from storage_formats.errors import cannot_read
from storage_formats.format.index_files import check_inside

CODE_SUFFIXES = frozenset({".dll", ".pickle", ".pkl", ".py", ".pyc", ".so"})
CODE_KEYS = frozenset({"auto_map", "custom_pipelines", "trust_remote_code"})
IMPLEMENTATION_KEYS = frozenset(
    {"_attn_implementation", "attn_implementation", "experts_implementation"}
)
WEIGHT_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".safetensors"})
# Largest size of a file without weights. For comparison, the file of a tokenizer with
# 256,000 words has 35 MB.
MAX_TEXT_BYTES = 256 << 20
TOKENIZER_CLASSES = frozenset(
    {
        "BertTokenizer",
        "CLIPTokenizer",
        "DistilBertTokenizer",
        "GemmaTokenizer",
        "M2M100Tokenizer",
        "MPNetTokenizer",
        "NllbTokenizer",
        "PreTrainedTokenizer",
        "RobertaTokenizer",
        "SiglipTokenizer",
        "T5Tokenizer",
        "TokenizersBackend",
        "XLMRobertaTokenizer",
    }
)


def check_bundle_folder(folder: Path) -> None:
    """Raise ModelError if the bundle in `folder` contains anything but data."""
    for file in sorted(folder.rglob("*")):
        try:
            status = check_inside(folder, file).stat()
        except OSError as error:
            advice = "restore the file, or do not use the bundle"
            raise ModelError(str(cannot_read(file, error, advice))) from error
        if not stat.S_ISDIR(status.st_mode):
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(
                    f"{file} is not a regular file: remove {file.name}, or do not use"
                    " the bundle"
                )
            if file.suffix not in WEIGHT_SUFFIXES and status.st_size > MAX_TEXT_BYTES:
                raise ModelError(
                    f"{file} has {status.st_size} bytes, too many for a file without"
                    " weights: do not use the bundle"
                )
        if file.suffix in CODE_SUFFIXES:
            raise ModelError(
                f"{file} is code, but a bundle may contain only data: remove this file,"
                " or do not use the bundle"
            )
        if file.name.endswith("config.json") and file.is_file():
            read_configuration(file)


def read_configuration(file: Path) -> Json:
    """Read a JSON configuration file.

    Raises:
        ModelError: the file cannot be read, is not a JSON object, or names code that
            would be run.
    """

    def checked(pairs: list[tuple[str, Any]]) -> Json:
        for key, value in pairs:
            names_hub_code = key in IMPLEMENTATION_KEYS and "/" in str(value)
            if (key in CODE_KEYS and value) or names_hub_code:
                raise ModelError(
                    f"{file} names code ({key!r}: {value!r}): remove this entry, or do"
                    " not use the model"
                )
        return dict(pairs)

    try:
        content = json.loads(
            file.read_text(encoding="utf-8"), object_pairs_hook=checked
        )
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {error}; restore this file") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{file} contains a {type(content).__name__} instead of a JSON object:"
            " restore this file"
        )
    return content


def check_tokenizer_folder(folder: Path) -> None:
    """Raise ModelError if a configuration in `folder` names a tokenizer class that is
    not in `TOKENIZER_CLASSES`.
    """
    for name in ("tokenizer_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        tokenizer_class = read_configuration(file).get("tokenizer_class")
        if (
            tokenizer_class
            and str(tokenizer_class).removesuffix("Fast") not in TOKENIZER_CLASSES
        ):
            raise ModelError(
                f"{file} names the tokenizer class {tokenizer_class!r}, which is not"
                f" accepted: use one of {', '.join(sorted(TOKENIZER_CLASSES))}"
            )
