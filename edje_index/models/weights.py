"""Reads and writes weights files. New files are safetensors files. Loading never runs
code from a file.

`limited_by` limits the size of a model to the size of its weights file. Without this
limit, a configuration file of a few bytes could describe a model that fills the memory.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from edje_index.errors import ModelError
from edje_index.models.devices import Float32Modules
from storage_formats.atomic import Json

State = dict[str, Tensor]
Module = TypeVar("Module", bound=nn.Module)

# A model may allocate one element per byte of its weights file. Each element takes at
# least 2 bytes in the file, so this is at least twice the number of elements in the
# file. Some models need this many, because they allocate a tensor twice. The spare
# elements are for masks and other tensors that are not in the file.
_SPARE_ELEMENTS = 16 << 20
# smallest number of bytes that a tensor takes in the file, including its name
_TENSOR_BYTES = 16
_SPARE_TENSORS = 10_000


def save_weights(module: nn.Module, path: Path) -> None:
    """Write the tensors of ``module`` to the safetensors file ``path``. A shared
    tensor is written once.
    """
    save_tensors(distinct_tensors(module), path)


def distinct_tensors(module: nn.Module) -> State:
    """Return the tensors of ``module`` by name. A tensor with several names gets
    only the first name.
    """
    aliases = tied_names(module)
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if name not in aliases
    }


def save_tensors(state: State, path: Path) -> None:
    """Write tensors to the safetensors file ``path``."""
    check_finite(state, path.name)
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in state.items()
    }
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        # safetensors reports the text of an OSError, which contains the error number.
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


def check_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Raise ModelError if weights from `source` contain NaN or infinity."""
    for name, tensor in state.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # If a value is NaN, `lowest` and `highest` are NaN. `aminmax` computes them in
        # one pass over the tensor.
        lowest, highest = tensor.aminmax()
        if not (lowest.isfinite() and highest.isfinite()):
            wrong = int((~torch.isfinite(tensor)).sum())
            raise ModelError(
                f"the tensor {name} of {source} contains {wrong} values that are NaN or"
                " infinite; give weights of a training run that did not diverge, or"
                " copy the file again"
            )


def read_weights(path: Path, prefix: str = "") -> State:
    """Read the tensors of a safetensors file with names that begin with ``prefix``.
    The prefix is removed.
    """
    try:
        with safe_open(path, framework="pt") as file:
            # `file` has the method `keys`, but cannot be iterated like a dictionary.
            every = file.keys()
            names = [name for name in every if name.startswith(prefix)]
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except (MemoryError, OSError, RuntimeError, SafetensorError) as error:
        # torch maps the file into memory and raises RuntimeError if this fails
        raise ModelError(
            f"cannot read the weights {path}: {error}; restore this file"
        ) from error


def assign_weights(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load the tensors in ``state`` into ``module``. `source` names the file or model
    that they come from.

    All names of the tensors in ``module`` must be in ``state``, except names that share
    the tensor of an earlier name. If ``module`` has no such names, it takes the tensors
    of ``state`` without a copy, unless their data type differs. Tensors that are mapped
    from a file then stay mapped, so that a large model is not in memory twice.

    Raises:
        ModelError: a tensor is missing, is not in ``module``, or has another shape or
            an integer type.
    """
    tied = tied_names(module)
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    for name, tensor in state.items():
        dtype = dtypes.get(name, tensor.dtype)
        if dtype.is_floating_point and not tensor.is_floating_point():
            raise ModelError(
                f"the tensor {name} of {source} has the data type {tensor.dtype}; give"
                " weights of a floating-point type"
            )
    if not tied:
        state = {
            name: tensor.to(dtypes.get(name, tensor.dtype))
            for name, tensor in state.items()
        }
    try:
        result = module.load_state_dict(state, strict=False, assign=not tied)
    except RuntimeError as error:
        problems = [one_line(error)]
    else:
        missing = sorted(set(result.missing_keys) - tied)
        unexpected = result.unexpected_keys
        problems = [
            f"{len(names)} tensors {kind}"
            f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
    if problems:
        raise ModelError(
            f"{source} does not fit the configuration of the model:"
            f" {', '.join(problems)}; give weights and a configuration of the same"
            " model"
        )
    # torch loads a tensor of shape [1] into a scalar. Its shape is restored, because a
    # saved copy of the weights must have the same bytes, and so the same fingerprint.
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            parameter.data = parameter.data.reshape(state[name].shape)


def load_module(path: Path, build: Callable[[], Module], prefix: str = "") -> Module:
    """Build a module, and load its tensors from the file `path`. Only tensors with
    names that begin with `prefix` are loaded, and the prefix is removed.
    """
    with limited_by(path):
        module = build()
    assign_weights(module, read_weights(path, prefix), str(path))
    return module


def tied_names(module: nn.Module) -> set[str]:
    """Return the names of tensors in ``module`` that are also stored under an
    earlier name.
    """
    seen: set[int] = set()
    tied = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            tied.add(name)
        seen.add(id(tensor))
    return tied


def read_checkpoint(path: Path) -> Json:
    """Read a file that ``torch.save`` wrote, with a dict of tensors and plain
    values. No code in the file runs.
    """
    try:
        if _can_expand(path):
            raise pickle.UnpicklingError
        with warnings.catch_warnings():
            # torch may warn about the pickle protocol of a file that it then refuses.
            warnings.simplefilter("ignore")
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"refused to read {path}, because the file is damaged or compressed, or"
            " contains Python objects that could run code: save the checkpoint again"
            " with only tensors, numbers, strings, lists and dicts"
        ) from error
    except Exception as error:
        # a damaged file can raise any exception
        raise ModelError(
            f"cannot read the checkpoint {path}: {one_line(error)}; copy this file"
            " again"
        ) from error
    if not isinstance(checkpoint, dict):
        raise ModelError(
            f"{path} is not a checkpoint, because the file contains a"
            f" {type(checkpoint).__name__} instead of a dict; give another file"
        )
    return checkpoint


def _can_expand(path: Path) -> bool:
    """Return True if a checkpoint could take much more memory than its file."""
    with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        # as a pickle names it: torch lets a pickle call `bytearray(size)`
        if data.find(b"\nbytearray\n") >= 0:
            return True
        if not zipfile.is_zipfile(file):
            return False
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
        # torch.save compresses nothing
        is_compressed = any(member.compress_type for member in members)
        return is_compressed or sum(each.file_size for each in members) > len(data)


def read_weights_files(files: Sequence[Path]) -> tuple[State, Json]:
    """Read weights files: safetensors files, and files that ``torch.save`` wrote. In
    the second kind, the tensors may be under the key "model" or "state_dict".

    Return the tensors of all files, and the content of the key "config", or an empty
    dictionary if no file has this key.
    """
    state: State = {}
    config: Json = {}
    for file in files:
        if file.suffix == ".safetensors":
            state |= read_weights(file)
            continue
        content = read_checkpoint(file)
        if isinstance(content.get("config"), dict):
            config = content["config"]
        for key in ("model", "state_dict"):
            if isinstance(content.get(key), dict):
                content = content[key]
        length = file.stat().st_size
        for name, tensor in content.items():
            if not isinstance(tensor, Tensor):
                continue
            # A small file may contain a large tensor that repeats a few stored values.
            # Such a tensor would fill the memory when it is copied.
            if tensor.numel() * tensor.element_size() > length:
                raise ModelError(
                    f"the tensor {name} is larger than its file {file}; do not use this"
                    " model"
                )
            state[str(name)] = tensor
    return state, config


@contextmanager
def limited_by(weights: Path, *more: Path) -> Iterator[None]:
    """Context manager that limits the number of tensors created in the context, and the
    number of their elements. The limits grow with the total size of the file `weights`
    and of the files `more` of the same model.

    Raises:
        ModelError: a limit is exceeded, or the model cannot be built for another
            reason.
    """
    try:
        length = sum(file.stat().st_size for file in (weights, *more))
        with _Budget(weights, length):
            yield
    except OSError as error:
        raise ModelError(
            f"cannot read the weights {weights}: {error.strerror}; restore this file"
        ) from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ModelError(
            f"cannot build the model for the weights {weights}: {one_line(error)};"
            " restore the configuration of the model"
        ) from error


class _Budget(Float32Modules):
    def __init__(self, weights: Path, length: int) -> None:
        super().__init__()
        self._weights = weights
        self._length = length
        self._elements = length + _SPARE_ELEMENTS
        self._tensors = length // _TENSOR_BYTES + _SPARE_TENSORS

    def check(self, tensor: Tensor) -> None:
        self._tensors -= 1
        self._elements -= tensor.numel()
        if min(self._tensors, self._elements) < 0:
            raise ModelError(
                "the configuration describes a larger model than the"
                f" {self._length} bytes of {self._weights} can contain: restore the"
                " weights if they are truncated, otherwise do not use this model"
            )


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, truncated to 400 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:400] + " ..."
