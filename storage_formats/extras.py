"""The error for a missing optional package. The message names the extra of
`edje-index` that installs the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from storage_formats.errors import EdjeError

_SEARCH = (
    "faiss",
    "huggingface_hub",
    "jinja2",
    "lark",
    "open_clip",
    "PIL",
    "safetensors",
    "scipy",
    "torch",
    "transformers",
)
# the optional modules that each extra installs
_MODULES = {
    "search": _SEARCH,
    "build": (*_SEARCH, "pathspec", "ray", "zarr"),
    "train": (*_SEARCH, "pydantic", "ray"),
    "bench": ("h5py", "lance", "lmdb", "tensorstore", "zarr"),
    "towers": ("onnx",),
    "demo": ("onnx",),
    "remote": ("huggingface_hub", "obstore", "urllib3"),
    "aws": ("botocore",),
    "video": ("av",),
    "serve": ("fastapi", "httpx", "prometheus_client", "pydantic", "uvicorn"),
    "mcp": ("mcp",),
    "langchain": ("langchain_core",),
    "llama-index": ("llama_index",),
}
EXTRAS_OF_MODULE = {
    module: [extra for extra, modules in _MODULES.items() if module in modules]
    for module in itertools.chain(*_MODULES.values())
}
"""For each optional module, the extras that install its package. The first extra of
each list is recommended.
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
"""For each optional module whose package has another name on PyPI, this name."""


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
        preferred: name of the extra to recommend. If this extra does not install the
            package, the message recommends the first extra in `EXTRAS_OF_MODULE`.
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
    """Context manager, also usable as a decorator, that raises `MissingExtraError` if
    its code fails to import an optional package.

    Args:
        preferred: name of the extra to recommend if this extra installs the package,
            see `missing_extra`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error, preferred)) is None:
            raise
        raise missing from error
