"""Weights on disk: safetensors for what this package writes, ``weights_only`` for what others wrote.

Names that share one tensor (tied embeddings) are stored once, under the first name.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from edje_index.errors import ModelError

State = dict[str, torch.Tensor]


def save_weights(module: torch.nn.Module, path: Path) -> None:
    """Write every distinct tensor of ``module`` to ``path`` (safetensors)."""
    aliases = tied_names(module)
    state = {k: v.detach().cpu().contiguous() for k, v in module.state_dict().items() if k not in aliases}
    save_file(state, path)


def read_weights(path: Path, prefix: str = "") -> State:
    """Tensors of a safetensors file whose names begin with ``prefix``, which is taken off.

    Only the tensors asked for are read.

    Raises:
        ModelError: the file cannot be read as safetensors.
    """
    try:
        if not prefix:
            return load_file(path)
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights {path}: {error}; restore the file or make it anew") from error


def assign_weights(module: torch.nn.Module, state: Mapping[str, torch.Tensor], what: str) -> None:
    """Copy ``state`` into ``module``; every tensor must be there, but for tied names, and none be left over.

    Raises:
        ModelError: names or shapes differ. ``what`` names the source in the message.
    """
    try:
        result = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ModelError(f"{what} does not fit the model that it should: {_one_line(error)}") from error
    missing = sorted(set(result.missing_keys) - tied_names(module))
    if missing or result.unexpected_keys:
        raise ModelError(
            f"{what} does not fit the model that it should: {len(missing)} tensors missing {_some(missing)}, "
            f"{len(result.unexpected_keys)} not known {_some(result.unexpected_keys)}"
        )


def tied_names(module: torch.nn.Module) -> set[str]:
    """Names of state tensors that are another name's tensor, all but the first of each."""
    seen: set[int] = set()
    tied = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            tied.add(name)
        seen.add(id(tensor))
    return tied


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a ``torch.save`` file of plain tensors and containers; no object in it is ever executed.

    Raises:
        ModelError: not such a file, or one that holds other Python objects.
    """
    if not path.is_file():
        raise ModelError(f"no checkpoint file at {path}; give the path of the .pth file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols, on its way to refusing
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"refused to read {path}: it is damaged or holds Python objects that could run code "
            "(only tensors, numbers, strings, lists and dicts are read); save it again with those alone"
        ) from error
    except Exception as error:  # what a damaged file raises depends on where the damage is
        raise ModelError(f"cannot read the checkpoint {path}: {_one_line(error)}") from error
    if not isinstance(checkpoint, dict):
        raise ModelError(f"{path} is not a training checkpoint: it holds a {type(checkpoint).__name__}, not a dict")
    return checkpoint


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"({shown}{', ...' if len(names) > 3 else ''})" if names else ""


def _one_line(error: BaseException, limit: int = 400) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[:limit] + " ..."
