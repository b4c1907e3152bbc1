"""The file format of an EDJE index, with writer, reader and verification.

This package needs NumPy, Numba and PyArrow. It does not need PyTorch, Ray or FAISS.
SPEC.md in this directory specifies the format. The names in `__all__` are the public
interface. Each name is imported when it is first used, so that importing the package
is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage_formats.codecs import codec as codec
    from storage_formats.codecs import precisions as precisions
    from storage_formats.errors import CorruptIndexError as CorruptIndexError
    from storage_formats.errors import DeletedRowError as DeletedRowError
    from storage_formats.errors import EdjeError as EdjeError
    from storage_formats.errors import IncompleteIndexError as IncompleteIndexError
    from storage_formats.errors import RowIdError as RowIdError
    from storage_formats.errors import UsageError as UsageError
    from storage_formats.extras import MissingExtraError as MissingExtraError
    from storage_formats.format.file_check import Problem as Problem
    from storage_formats.format.layout import IndexSpec as IndexSpec
    from storage_formats.format.manifest import Manifest as Manifest
    from storage_formats.format.rows import read_rows as read_rows
    from storage_formats.token_store import TokenStore as TokenStore
    from storage_formats.verify import verify_index as verify_index
    from storage_formats.writing.index_writer import IndexWriter as IndexWriter

_NAMES = {
    "storage_formats.codecs": "codec precisions",
    "storage_formats.errors": (
        "CorruptIndexError DeletedRowError EdjeError IncompleteIndexError RowIdError"
        " UsageError"
    ),
    "storage_formats.extras": "MissingExtraError",
    "storage_formats.format.file_check": "Problem",
    "storage_formats.format.layout": "IndexSpec",
    "storage_formats.format.manifest": "Manifest",
    "storage_formats.format.rows": "read_rows",
    "storage_formats.token_store": "TokenStore",
    "storage_formats.verify": "verify_index",
    "storage_formats.writing.index_writer": "IndexWriter",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
