"""The file format of an EDJE index, with writer, reader and verification.

This package needs NumPy, Numba and PyArrow. It does not need PyTorch, Ray or FAISS. SPEC.md in this directory specifies
the format. The names in `__all__` are the public interface. Each name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage_formats.codecs import codec, precisions
    from storage_formats.errors import (
        CorruptIndexError,
        DeletedRowError,
        EdjeError,
        IncompleteIndexError,
        RowIdError,
        UsageError,
    )
    from storage_formats.extras import MissingExtraError
    from storage_formats.format.layout import IndexSpec
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.rows import read_rows
    from storage_formats.shard_check import Problem
    from storage_formats.token_store import TokenStore
    from storage_formats.verify import verify_index
    from storage_formats.writing.index_writer import IndexWriter
    from storage_formats.writing.shard_writer import ShardWriter

_MODULES = {
    "CorruptIndexError": "storage_formats.errors",
    "DeletedRowError": "storage_formats.errors",
    "EdjeError": "storage_formats.errors",
    "IncompleteIndexError": "storage_formats.errors",
    "IndexWriter": "storage_formats.writing.index_writer",
    "IndexSpec": "storage_formats.format.layout",
    "MissingExtraError": "storage_formats.extras",
    "Manifest": "storage_formats.format.manifest",
    "Problem": "storage_formats.shard_check",
    "RowIdError": "storage_formats.errors",
    "ShardWriter": "storage_formats.writing.shard_writer",
    "TokenStore": "storage_formats.token_store",
    "UsageError": "storage_formats.errors",
    "codec": "storage_formats.codecs",
    "precisions": "storage_formats.codecs",
    "read_rows": "storage_formats.format.rows",
    "verify_index": "storage_formats.verify",
}

__all__ = [
    "CorruptIndexError",
    "DeletedRowError",
    "EdjeError",
    "IncompleteIndexError",
    "IndexSpec",
    "IndexWriter",
    "Manifest",
    "MissingExtraError",
    "Problem",
    "RowIdError",
    "ShardWriter",
    "TokenStore",
    "UsageError",
    "codec",
    "precisions",
    "read_rows",
    "verify_index",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
