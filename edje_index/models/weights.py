"""Reads and writes weights files. New files are safetensors files. Loading never runs code from a file."""

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
    """Write the tensors of ``module`` to the safetensors file ``path``. A shared tensor is written once."""
    save_tensors(distinct_tensors(module), path)


def distinct_tensors(module: torch.nn.Module) -> State:
    """Return the tensors of ``module`` by name. A tensor with several names gets only the first name."""
    aliases = tied_names(module)
    return {name: tensor for name, tensor in module.state_dict().items() if name not in aliases}


def save_tensors(state: State, path: Path) -> None:
    """Write tensors to the safetensors file ``path``.

    Raises:
        ModelError: a value is NaN or infinite.
    """
    check_finite(state, path.name)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path)


def check_finite(state: Mapping[str, torch.Tensor], source: str) -> None:
    """Check that weights contain neither NaN nor infinity.

    Args:
        state: tensors by name.
        source: file or model that the tensors come from, for the error message.

    Raises:
        ModelError: a tensor contains such a value.
    """
    for name, tensor in state.items():
        if not _is_finite(tensor):
            wrong = int((~torch.isfinite(tensor)).sum())
            raise ModelError(
                f"the tensor {name} of {source} contains {wrong} values that are NaN or infinite; give weights of a "
                "training run that did not diverge, or copy the file again"
            )


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    lowest, highest = tensor.aminmax()  # NaN if a value is NaN; one pass, without a copy
    return bool(lowest.isfinite() and highest.isfinite())


def read_weights(path: Path, prefix: str = "") -> State:
    """Read the tensors of a safetensors file with names that begin with ``prefix``. The prefix is removed.

    Raises:
        ModelError: the file cannot be read or is not a safetensors file.
    """
    try:
        if not prefix:
            return load_file(path)
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except (
        MemoryError,
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # torch maps the file into memory and raises RuntimeError if this fails
        raise ModelError(f"cannot read the weights {path}: {error}; restore this file") from error


def assign_weights(module: torch.nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy the tensors in ``state`` into ``module``.

    Args:
        module: module to change.
        state: tensors by name.
        source: file or model that the tensors come from, for error messages.

    Raises:
        ModelError: ``state`` and ``module`` have different names or shapes.
    """
    # Only names that share the tensor of an earlier name may be missing.
    try:
        result = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ModelError(
            f"{source} does not fit the configuration of the model: {_one_line(error)}; "
            "give weights and a configuration of the same model"
        ) from error
    differences = {
        "missing": sorted(set(result.missing_keys) - tied_names(module)),
        "unexpected": result.unexpected_keys,
    }
    problems = [f"{len(names)} tensors {kind} ({_first(names)})" for kind, names in differences.items() if names]
    if problems:
        raise ModelError(
            f"{source} does not fit the configuration of the model: {', '.join(problems)}; "
            "give weights and a configuration of the same model"
        )


def tied_names(module: torch.nn.Module) -> set[str]:
    """Return the names of tensors in ``module`` that are also stored under an earlier name."""
    seen: set[int] = set()
    tied = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            tied.add(name)
        seen.add(id(tensor))
    return tied


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a file that ``torch.save`` wrote, with a dict of tensors and plain values. No code in the file runs.

    Raises:
        ModelError: the file is missing or damaged, does not contain a dict, or contains other Python objects.
    """
    if not path.is_file():
        raise ModelError(f"there is no checkpoint file at {path}; give the path of the .pth file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickle protocols before it refuses a file
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"refused to read {path}, because the file is damaged or contains Python objects that could run code: save "
            "the checkpoint again with only tensors, numbers, strings, lists and dicts"
        ) from error
    except Exception as error:  # a damaged file can raise any exception
        raise ModelError(f"cannot read the checkpoint {path}: {_one_line(error)}; copy this file again") from error
    if not isinstance(checkpoint, dict):
        raise ModelError(
            f"{path} is not a checkpoint, because the file contains a {type(checkpoint).__name__} instead of a dict; "
            "give another file"
        )
    return checkpoint


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _one_line(error: BaseException, limit: int = 400) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + " ..."
