"""The `zarr.json` documents and shard indexes of an index, in the format of Zarr v3 and
its sharding codec (ZEP 2).

This module uses no Zarr library, because SPEC.md prescribes the exact contents of the
documents.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from storage_formats.arrays import Bools
from storage_formats.atomic import Json
from storage_formats.codecs import codec
from storage_formats.format.checksum import crc32c
from storage_formats.format.layout import (
    FORMAT_VERSION,
    OFFSET_ARRAY,
    IndexSpec,
    Layout,
)

ABSENT = np.uint64(2**64 - 1)
"""Offset and length of a missing inner chunk (Zarr sharding codec, "Binary shard
format").
"""
_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}


def zarr_documents(layout: Layout, spec: IndexSpec) -> dict[Path, Json]:
    """Return the contents of each `zarr.json` of an index, keyed by path."""
    group = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"edje": {"format_version": FORMAT_VERSION}},
    }
    shape = (spec.rows, spec.embed_dim)
    chunk_shape = (spec.shard_size, spec.embed_dim)
    embeddings = _array(
        shape,
        chunk_shape,
        ("row", "dimension"),
        {"format_version": FORMAT_VERSION, "normalised": "l2"},
    )
    documents = {layout.tokens: group, layout.embeddings: embeddings}
    for name in spec.precisions:
        documents[layout.token_array(name)] = _token_array(spec, name)
    if spec.offset is not None:
        names = ("token", "channel")
        attributes = {"format_version": FORMAT_VERSION}
        documents[layout.token_array(OFFSET_ARRAY)] = _array(
            spec.block_shape, spec.block_shape, names, attributes
        )
    return {folder / "zarr.json": each for folder, each in documents.items()}


def _array(
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    names: tuple[str, ...],
    attributes: Json,
    data_type: str = "float32",
    fill_value: float | str = "NaN",
    codec: Json = _LITTLE_ENDIAN,
) -> Json:
    """Return the `zarr.json` of an array.

    Args:
        names: names of the dimensions.
        attributes: value of the attribute `edje`.
    """
    return {
        "zarr_format": 3,
        "node_type": "array",
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk_shape)},
        },
        "fill_value": fill_value,
        "codecs": [codec],
        "dimension_names": list(names),
        "attributes": {"edje": attributes},
    }


def _token_array(spec: IndexSpec, precision: str) -> Json:
    token_codec = codec(precision, spec.block_shape)
    # The Zarr codec `bytes` has no byte order if the values are single bytes.
    bytes_codec = (
        _LITTLE_ENDIAN if token_codec.zarr_dtype != "uint8" else {"name": "bytes"}
    )
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1, *token_codec.record_shape],
            "codecs": [bytes_codec],
            "index_codecs": [_LITTLE_ENDIAN, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    attributes: Json = {
        "format_version": FORMAT_VERSION,
        "precision": precision,
        "logical_dtype": token_codec.form.logical_dtype,
        "block_shape": list(spec.block_shape),
        "record_bytes": token_codec.record_bytes,
    }
    if spec.offset is not None and precision in spec.offset.precisions:
        attributes |= {
            "offset": f"tokens/{OFFSET_ARRAY}",
            "formula": "bfloat16(decoded record + offset), the sum in float32",
        }
    record = token_codec.record_shape
    return _array(
        (spec.rows, *record),
        (spec.shard_size, *record),
        ("row", "token", "channel") if len(record) == 2 else ("row", "byte"),
        attributes,
        token_codec.zarr_dtype,
        token_codec.fill_value,
        sharding,
    )


def shard_index_bytes(present: Bools, record_bytes: int) -> bytes:
    """Return the Zarr shard index of a token file: a pair (offset, length) of uint64
    for each position, followed by the CRC-32C of these pairs.

    Args:
        present: bool [shard_size], whether each position has a record. A position
            without a record is a hole, or lies after the last row.
    """
    entries = np.full((len(present), 2), ABSENT, dtype="<u8")
    positions = np.flatnonzero(present).astype("<u8")
    entries[present, 0] = positions * np.uint64(record_bytes)
    entries[present, 1] = record_bytes
    data = entries.tobytes()
    return data + crc32c(data).to_bytes(4, "little")
