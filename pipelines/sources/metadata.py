"""Reads the metadata of images from columns of a list, or from `.json` and `.txt` files
next to the images.

The metadata becomes source columns of the rows table (SPEC.md section 9).
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.sources.base import Ignored
from storage_formats.format.parquet import iter_batches
from storage_formats.format.source_columns import Value, is_allowed, stored_name

CAPTIONS = "captions"
"""Name of the column with the lines of a `.txt` file beside an image."""

SIDECAR_SUFFIXES = (".json", ".txt")
MAX_SIDECAR_BYTES = 1 << 20
BINARY = "(binary column)"
UNREADABLE = "(unreadable metadata)"
BAD_NAME = "(column name not allowed)"
_INT64 = range(-(1 << 63), 1 << 63)


def source_values(
    values: Mapping[Any, Any], ignored: Ignored
) -> dict[str, Value] | None:
    """Return the metadata of one image by column name; None if there is no value.

    Nulls are left out. A value of a type that the rows table does not support, such as
    a JSON object, becomes text.

    `ignored` counts names that a column cannot have.
    """
    from storage_formats.format.rows import ROW_SCHEMA

    result: dict[str, Value] = {}
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(name, str) or not is_allowed(
            column := stored_name(name, ROW_SCHEMA.names)
        ):
            ignored.count(BAD_NAME)
        else:
            result[column] = _typed(value)
    return result or None


def python_values(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `values` with Python objects in place of the numbers, dates and arrays of
    NumPy and PyTorch.
    """
    return {
        name: _python_value(value.astype("M8[us]"))
        if isinstance(value, np.datetime64)
        else _python_value(value)
        for name, value in values.items()
    }


def _python_value(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def sidecar_values(
    contents: Mapping[str, bytes | None], ignored: Ignored
) -> dict[str, Value] | None:
    """Return the metadata in the files next to an image; None if there is no metadata.

    The `.json` file contains an object of values. Each line of the `.txt` file is a
    caption.

    `contents` has the content of each file by suffix (see `SIDECAR_SUFFIXES`), or None
    for a file that cannot be used.
    """
    values: dict[str, Any] = {}
    # the object comes first, so that its captions win
    for suffix, content in sorted(contents.items()):
        try:
            text = (content or b"").decode("utf-8-sig")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            parsed = (
                json.loads(text) if suffix == ".json" else {CAPTIONS: lines or None}
            )
        except (ValueError, RecursionError):
            parsed = None
        if content is None or not isinstance(parsed, dict):
            ignored.count(UNREADABLE)
        else:
            values = {**parsed, **values}
    return source_values(values, ignored)


def metadata_columns(schema: Any, input_column: str, ignored: Ignored) -> list[str]:
    """Return the names of the columns with metadata: all columns except `input_column`
    and unusable columns.

    A column is unusable if it has binary values, or if another column has the same
    name. `ignored` counts these columns.
    """
    copies = Counter(schema.names)
    names: list[str] = []
    for field in schema:
        if field.name == input_column:
            continue
        if copies[field.name] > 1:
            ignored.count(BAD_NAME)
        elif _holds_binary(field.type):
            ignored.count(BINARY)
        else:
            names.append(field.name)
    return names


def _holds_binary(arrow_type: Any) -> bool:
    if pa.types.is_dictionary(arrow_type):
        return _holds_binary(arrow_type.value_type)
    tests = (
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_fixed_size_binary,
    )
    fields = [arrow_type.field(index) for index in range(arrow_type.num_fields)]
    return any(test(arrow_type) for test in tests) or any(
        _holds_binary(field.type) for field in fields
    )


def features_of(schema: Any) -> dict[str, dict[str, Any]]:
    """Return what Hugging Face Datasets recorded about each column; {} if another
    program wrote the file.
    """
    with contextlib.suppress(
        AttributeError, KeyError, TypeError, ValueError, RecursionError
    ):
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"][
            "features"
        ]
        return {
            name: feature
            for name, feature in features.items()
            if isinstance(feature, dict)
        }
    return {}


def parquet_rows(
    file: Any, names: list[str], rows: int, leaves: list[str] | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield the values of the columns `names` of each row of an open Parquet file, as
    Python objects.

    A class label of Hugging Face Datasets is its name. If a text is not UTF-8, the
    texts of its batch become bytes. If a value has no Python object, they become text.
    `rows` rows are read at once. `leaves` are the columns to read, if only parts of
    structs are needed.
    """
    features = features_of(file.schema_arrow)
    for batch in iter_batches(file, rows, names if leaves is None else leaves):
        values: list[list[Any]] = []
        for name in names:
            column = batch.column(batch.schema.get_all_field_indices(name)[0])
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
            try:
                values.append(column.to_pylist())
            except UnicodeDecodeError:
                values.append(column.cast(pa.binary()).to_pylist())
            except (ValueError, OverflowError):
                # a date after the year 9999, for example
                values.append(column.cast(pa.string()).to_pylist())
            classes = features.get(name, {}).get("names")
            # -1 is no label
            if isinstance(classes, list) and pa.types.is_integer(column.type):
                values[-1] = [
                    classes[label] if label in range(len(classes)) else None
                    for label in values[-1]
                ]
        yield from zip(*values, strict=True)


def _typed(value: Any) -> Value:
    """Convert a value to one of the types of source columns."""
    if isinstance(value, str):
        return value if value.isascii() else type(value)(_as_unicode(value))
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if value in _INT64 else str(value)
    if isinstance(value, datetime.datetime):
        return (
            value.astimezone(datetime.UTC)
            if value.tzinfo
            else value.replace(tzinfo=datetime.UTC)
        )
    if isinstance(value, datetime.date):
        return datetime.datetime(
            value.year, value.month, value.day, tzinfo=datetime.UTC
        )
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [_as_unicode(item) for item in value]
    return _as_unicode(
        json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, list | dict)
        else str(value)
    )


def _as_unicode(text: str) -> str:
    """Return `text` with lone surrogates, which UTF-8 cannot encode, replaced by
    escapes such as \\udc80.
    """
    return text.encode("utf-8", "backslashreplace").decode()
