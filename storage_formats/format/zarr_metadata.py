"""The `zarr.json` documents of an index, in the format of Zarr v3 and its sharding codec (ZEP 2).

This module uses no Zarr library, because SPEC.md prescribes the exact contents of the documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage_formats.codecs import codec
from storage_formats.format.layout import FORMAT_VERSION, IndexSpec, Layout

_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_ARRAY = {
    "zarr_format": 3,
    "node_type": "array",
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
}


def zarr_documents(layout: Layout, spec: IndexSpec) -> dict[Path, dict[str, Any]]:
    """Return the contents of each `zarr.json` of an index, keyed by path."""
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"edje": {"format_version": FORMAT_VERSION}}}
    embeddings = {
        **_ARRAY,
        "shape": [spec.rows, spec.embed_dim],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [spec.shard_size, spec.embed_dim]}},
        "fill_value": "NaN",
        "codecs": [_LITTLE_ENDIAN],
        "dimension_names": ["row", "dimension"],
        "attributes": {"edje": {"format_version": FORMAT_VERSION, "normalised": "l2"}},
    }
    tokens = [_token_array(spec, name) for name in spec.precisions]
    return dict(zip(layout.zarr_files(spec.precisions), (group, embeddings, *tokens), strict=True))


def _token_array(spec: IndexSpec, precision: str) -> dict[str, Any]:
    token_codec = codec(precision, spec.block_shape)
    bytes_codec = _LITTLE_ENDIAN if token_codec.zarr_dtype != "uint8" else {"name": "bytes"}
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1, *token_codec.record_shape],
            "codecs": [bytes_codec],
            "index_codecs": [_LITTLE_ENDIAN, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    attributes = {
        "format_version": FORMAT_VERSION,
        "precision": precision,
        "logical_dtype": token_codec.logical_dtype,
        "block_shape": list(spec.block_shape),
        "record_bytes": token_codec.record_bytes,
    }
    chunk_shape = [spec.shard_size, *token_codec.record_shape]
    names = ["row", "token", "channel"] if len(token_codec.record_shape) == 2 else ["row", "byte"]
    return {
        **_ARRAY,
        "shape": [spec.rows, *token_codec.record_shape],
        "data_type": token_codec.zarr_dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "fill_value": token_codec.fill_value,
        "codecs": [sharding],
        "dimension_names": names,
        "attributes": {"edje": attributes},
    }
