"""The error that names the extra to install when an optional package is missing.

This module is in the lowest package because all packages use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from storage_formats.errors import EdjeError

EXTRAS_OF_MODULE = {
    "faiss": ("search", "build", "train"),
    "fastapi": ("serve",),
    "h5py": ("bench",),
    "httpx": ("serve",),
    "jinja2": ("search", "build", "train"),
    "lance": ("bench",),
    "lark": ("search", "build", "train"),
    "lmdb": ("bench",),
    "matplotlib": ("search", "build", "train", "bench"),
    "onnx": ("towers", "demo"),
    "open_clip": ("search", "build", "train"),
    "prometheus_client": ("serve",),
    "pydantic": ("train", "serve"),
    "PIL": ("search", "build", "train"),
    "ray": ("build", "train"),
    "safetensors": ("search", "build", "train"),
    "scipy": ("search", "build", "train"),
    "tensorboard": ("train",),
    "tensorstore": ("bench",),
    "torch": ("search", "build", "train"),
    "transformers": ("search", "build", "train"),
    "uvicorn": ("serve",),
    "zarr": ("build", "bench"),
    "zarrs": ("bench",),
}
"""For each optional module, the extras that install it, the smallest extra first."""


class MissingExtraError(EdjeError, ImportError):
    """An optional module is not installed. The message names the command that installs the module.

    Example:
        >>> from storage_formats.extras import missing_extra
        >>> str(missing_extra(ModuleNotFoundError("No module named 'onnx'", name="onnx")))
        "this needs the package onnx, which is not installed; run: pip install 'edje-index[towers]'"
    """


def missing_extra(error: BaseException, preferred: str = "") -> MissingExtraError | None:
    """Return the error that names the extra to install; None if `error` has another cause.

    Args:
        error: any exception.
        preferred: name of the extra to recommend if it installs the module. Otherwise the smallest extra that installs
            the module is recommended.
    """
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    extras = EXTRAS_OF_MODULE.get(module)
    if extras is None:
        return None
    extra = preferred if preferred in extras else extras[0]
    return MissingExtraError(
        f"this needs the package {module}, which is not installed; run: pip install 'edje-index[{extra}]'", name=module
    )


@contextmanager
def name_missing_extra(preferred: str = "") -> Iterator[None]:
    """Context manager and decorator that turns a failed import of an optional module into `MissingExtraError`.

    Args:
        preferred: see `missing_extra`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error, preferred)) is None:
            raise
        raise missing from error
