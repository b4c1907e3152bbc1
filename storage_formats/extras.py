"""The error for a missing optional package. Its message names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from storage_formats.errors import EdjeError

EXTRAS_OF_MODULE = {
    "av": ("video",),
    "botocore": ("aws",),
    "faiss": ("search", "build", "train"),
    "fastapi": ("serve",),
    "h5py": ("bench",),
    "httpx": ("serve",),
    "huggingface_hub": ("search", "build", "train", "remote"),
    "jinja2": ("search", "build", "train"),
    "lance": ("bench",),
    "langchain_core": ("langchain",),
    "lark": ("search", "build", "train"),
    "llama_index": ("llama-index",),
    "lmdb": ("bench",),
    "matplotlib": ("bench",),
    "mcp": ("mcp",),
    "obstore": ("remote",),
    "onnx": ("towers", "demo"),
    "open_clip": ("search", "build", "train"),
    "prometheus_client": ("serve",),
    "pydantic": ("train", "serve"),
    "PIL": ("search", "build", "train"),
    "pathspec": ("build",),
    "ray": ("build", "train"),
    "safetensors": ("search", "build", "train"),
    "scipy": ("search", "build", "train"),
    "tensorstore": ("bench",),
    "torch": ("search", "build", "train"),
    "transformers": ("search", "build", "train"),
    "urllib3": ("remote",),
    "uvicorn": ("serve",),
    "zarr": ("build", "bench"),
}
"""For each optional package, the extras that install the package, the smallest
extra first.
"""

DISTRIBUTIONS = {
    "botocore": "boto3",
    "faiss": "faiss-cpu",
    "lance": "pylance",
    "langchain_core": "langchain-core",
    "llama_index": "llama-index-core",
    "open_clip": "open_clip_torch",
    "PIL": "pillow",
    "prometheus_client": "prometheus-client",
}
"""The package in the registry, where its name differs from that of the module."""


class MissingExtraError(EdjeError, ImportError):
    """An optional package is not installed. The message contains the command that
    installs the package.

    Examples:
        >>> from storage_formats.extras import missing_extra
        >>> error = ModuleNotFoundError("No module named 'onnx'", name="onnx")
        >>> needs, remedy = str(missing_extra(error)).split("; ")
        >>> needs
        'this needs the package onnx, which is not installed'
        >>> remedy
        "run: pip install 'edje-index[towers]'"
    """


def missing_extra(
    error: BaseException, preferred: str = ""
) -> MissingExtraError | None:
    """Return a `MissingExtraError` if `error` is the failed import of an optional
    package, otherwise None.

    Args:
        preferred: name of the extra to recommend. If this extra does not contain the
            package, the error recommends the smallest extra that does.
    """
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    extras = EXTRAS_OF_MODULE.get(module)
    if extras is None:
        return None
    extra = preferred if preferred in extras else extras[0]
    missing = MissingExtraError(
        f"this needs the package {DISTRIBUTIONS.get(module, module)}, which is not"
        f" installed; run: pip install 'edje-index[{extra}]'"
    )
    missing.name = module
    return missing


@contextmanager
def name_missing_extra(preferred: str = "") -> Iterator[None]:
    """Raise `MissingExtraError` if the import of an optional package fails. Context
    manager and decorator.

    Args:
        preferred: name of the extra to recommend if it contains the package, see
            `missing_extra`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error, preferred)) is None:
            raise
        raise missing from error
