"""The bytes of an EDJE index and their meaning: format, writer, reader, verification.

Light on purpose: NumPy, PyArrow and checksums, no torch, Ray or FAISS. The normative text is SPEC.md beside
this file. Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage_formats.codecs import codec, precisions
    from storage_formats.errors import CorruptIndexError, EdjeError, IncompleteIndexError, UsageError
    from storage_formats.layout import IndexSpec
    from storage_formats.manifest import Manifest
    from storage_formats.rows import read_rows
    from storage_formats.shard_writer import ShardWriter
    from storage_formats.token_store import TokenStore
    from storage_formats.verify import Problem, verify_index

_HOME = {
    "CorruptIndexError": "errors",
    "EdjeError": "errors",
    "IncompleteIndexError": "errors",
    "IndexSpec": "layout",
    "Manifest": "manifest",
    "Problem": "verify",
    "ShardWriter": "shard_writer",
    "TokenStore": "token_store",
    "UsageError": "errors",
    "codec": "codecs",
    "precisions": "codecs",
    "read_rows": "rows",
    "verify_index": "verify",
}

__all__ = [
    "CorruptIndexError",
    "EdjeError",
    "IncompleteIndexError",
    "IndexSpec",
    "Manifest",
    "Problem",
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
    return getattr(import_module(f"storage_formats.{_HOME[name]}"), name)
