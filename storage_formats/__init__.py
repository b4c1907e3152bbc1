"""The bytes of an EDJE index and their meaning: format, writer, reader, verification.

Light on purpose: NumPy, PyArrow and checksums, no torch, Ray or FAISS. The normative text is SPEC.md beside
this file. Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage_formats.codecs import codec, precisions
    from storage_formats.errors import CorruptIndexError, EdjeError, IncompleteIndexError, RowIdError, UsageError
    from storage_formats.format.layout import IndexSpec
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.rows import read_rows
    from storage_formats.token_store import TokenStore
    from storage_formats.verify import Problem, verify_index
    from storage_formats.writing.index_writer import IndexWriter
    from storage_formats.writing.shard_writer import ShardWriter

_HOME = {
    "CorruptIndexError": "storage_formats.errors",
    "EdjeError": "storage_formats.errors",
    "IncompleteIndexError": "storage_formats.errors",
    "IndexWriter": "storage_formats.writing.index_writer",
    "IndexSpec": "storage_formats.format.layout",
    "Manifest": "storage_formats.format.manifest",
    "Problem": "storage_formats.verify",
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
    "EdjeError",
    "IncompleteIndexError",
    "IndexSpec",
    "IndexWriter",
    "Manifest",
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
    if name not in _HOME:
        raise AttributeError(f"module 'storage_formats' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
