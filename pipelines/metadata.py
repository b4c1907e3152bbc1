"""Reads the metadata of images from columns of a list, or from `.json` and `.txt` files
next to the images.

The metadata becomes source columns of the rows table (SPEC.md section 9).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from edje_index.inputs.json_lines import text_lines
from edje_index.inputs.ranges import POINTERS
from storage_formats.atomic import Json
from storage_formats.format.column_types import BYTES, TEXT, column_kind
from storage_formats.format.parquet import iter_batches
from storage_formats.format.source_columns import (
    Value,
    is_allowed,
    python_value,
    stored_name,
)

CAPTIONS = "captions"
"""Name of the column with the lines of a `.txt` file beside an image."""

# keys under which `Ignored` counts metadata that cannot be stored
BINARY = "(binary column)"
UNREADABLE = "(unreadable metadata)"
NOT_FINITE = "(number not finite)"
BAD_NAME = "(column name not allowed)"
# A text with lone surrogates is not valid Unicode. The surrogates stand for bytes that
# are not UTF-8, or come from escapes in JSON.
_BROKEN = re.compile("[\ud800-\udfff]")
_INT64 = range(-(1 << 63), 1 << 63)
# limits on the keys of `Ignored`: characters of a suffix, and number of keys
_LONGEST_SUFFIX = 12
_MAX_KEYS = 100


class Ignored(dict[str, int]):
    """Counts the entries that are not inputs, by suffix or by reason in
    parentheses. Thread-safe.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def count(
        self,
        key: str,
        entries: int = 1,
    ) -> None:
        """Add `entries` to the count of `key`. A new key that is a very long suffix, or
        comes after 100 other keys, is counted under "(other)".
        """
        with self._lock:
            if key not in self and (
                (len(key) > _LONGEST_SUFFIX and key[0] == ".") or len(self) >= _MAX_KEYS
            ):
                key = "(other)"
            self[key] = self.get(key, 0) + entries


def source_values(
    values: Mapping[Any, Any], ignored: Ignored
) -> dict[str, Value] | None:
    """Return the metadata of one image by column name; None if there is no value.

    Nulls are left out. A value of a type that the rows table does not support, such as
    a JSON object, becomes text.

    Values are left out and counted in `ignored` if their name is not allowed for a
    column, or if they are numbers that are not finite, texts that are not Unicode, or
    times outside the years 1 to 9999 in UTC.
    """
    from storage_formats.format.rows import ROW_SCHEMA

    result: dict[str, Value] = {}
    for name, value in values.items():
        try:
            checked = _checked(python_value(value), ignored)
        except (RecursionError, OverflowError):
            ignored.count(UNREADABLE)
            continue
        if checked is None:
            continue
        if not isinstance(name, str) or not is_allowed(
            column := stored_name(name, ROW_SCHEMA.names)
        ):
            ignored.count(BAD_NAME)
        else:
            result[column] = _typed(checked)
    return result or None


def sidecar_values(
    contents: Mapping[str, bytes | None], ignored: Ignored
) -> dict[str, Value] | None:
    """Return the metadata in the files next to an image; None if there is no metadata.

    The `.json` file contains an object of values. Each line of the `.txt` file is a
    caption.

    `contents` has the content of each file by suffix (see `SIDECAR_SUFFIXES`), or None
    for a file that cannot be used.
    """
    values: Json = {}
    # `.json` comes before `.txt`. If the object has captions, they win over the lines.
    for suffix, content in sorted(contents.items()):
        try:
            text = (content or b"").decode("utf-8-sig")
            parsed = (
                json.loads(text)
                if suffix == ".json"
                else {CAPTIONS: text_lines(text) or None}
            )
        except (ValueError, RecursionError):
            parsed = None
        is_pointer = (content or b"").startswith(POINTERS)
        if content is None or is_pointer or not isinstance(parsed, dict):
            ignored.count(UNREADABLE)
        else:
            values = {**parsed, **values}
    return source_values(values, ignored)


def metadata_columns(
    schema: Any,
    input_column: str | None,
    ignored: Ignored,
) -> list[str]:
    """Return the names of the columns with metadata. These are all columns except
    `input_column` and unusable columns.

    A column is unusable if it has binary values, or if another column has the same
    name. Unusable columns are counted in `ignored`.
    """
    copies = Counter(schema.names)
    names: list[str] = []
    for field in schema:
        if field.name == input_column:
            continue
        if copies[field.name] > 1:
            ignored.count(BAD_NAME)
        elif holds_binary(field.type):
            ignored.count(BINARY)
        else:
            names.append(field.name)
    return names


def holds_binary(arrow_type: Any) -> bool:
    """Return True if an Arrow type is binary, or contains a binary type, such as a list
    or a struct of binary values.
    """
    fields = [arrow_type.field(index) for index in range(arrow_type.num_fields)]
    return column_kind(arrow_type) == BYTES or any(
        holds_binary(field.type) for field in fields
    )


def features_of(schema: Any) -> dict[str, Json]:
    """Return the descriptions of columns ("features") that Hugging Face Datasets
    recorded in a Parquet schema, by column name; {} if another program wrote the file.
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
    file: Any,
    names: list[str],
    rows: int,
    leaves: list[str] | None = None,
) -> Iterator[tuple[Any, ...]]:
    """For each row of an open Parquet file, yield the values of the columns `names` as
    Python objects.

    A class label of Hugging Face Datasets becomes the name of the class. A text that is
    not UTF-8 becomes bytes. A value that no Python type can hold becomes text, or empty
    bytes if it cannot be converted to text.

    Args:
        file: open Parquet file.
        names: names of the columns, in the order in which the values are yielded.
        rows: number of rows to read at once.
        leaves: paths of the Parquet columns to read, if only parts of structs are
            needed. None reads `names` completely.
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
            except (ValueError, OverflowError):
                values.append(list(map(_python_value, column)))
            classes = features.get(name, {}).get("names")
            # A label that is not the number of a class, such as -1, means that the row
            # has no label.
            if isinstance(classes, list) and pa.types.is_integer(column.type):
                values[-1] = [
                    classes[label] if label in range(len(classes)) else None
                    for label in values[-1]
                ]
        yield from zip(*values, strict=True)


def _python_value(scalar: Any) -> Any:
    """Convert an Arrow value to a Python object by the rules of `parquet_rows`."""
    value = scalar.value if isinstance(scalar, pa.DictionaryScalar) else scalar
    try:
        return value.as_py()
    except UnicodeDecodeError:
        is_text = column_kind(value.type) == TEXT
        return value.as_buffer().to_pybytes() if is_text else b""
    except (ValueError, OverflowError):
        # Python has no type for this value, for example for a date after the year 9999.
        with contextlib.suppress(pa.ArrowException):
            return value.cast(pa.string()).as_py()
        return b""


def _checked(value: Any, ignored: Ignored) -> Any:
    """Return a value in which None replaces numbers that are not finite, bytes, and
    texts that are not Unicode. The replaced values are counted in `ignored`.
    """
    if isinstance(value, list):
        return [_checked(item, ignored) for item in value]
    if isinstance(value, dict):
        return {key: _checked(item, ignored) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        ignored.count(NOT_FINITE)
        return None
    is_broken = isinstance(value, str) and not value.isascii() and _BROKEN.search(value)
    if is_broken or isinstance(value, bytes):
        ignored.count(UNREADABLE)
        return None
    return value


def _typed(value: Any) -> Value:
    """Convert a value to one of the types of source columns."""
    if isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if value in _INT64 else str(value)
    if isinstance(value, datetime.datetime):
        return value
    if isinstance(value, datetime.date):
        return datetime.datetime(
            value.year, value.month, value.day, tzinfo=datetime.UTC
        )
    if isinstance(value, list):
        texts = [item for item in value if item is not None]
        if all(isinstance(item, str) for item in texts):
            return texts
    if not isinstance(value, list | dict):
        return str(value)
    # The keys of a JSON object can contain lone surrogates, which UTF-8 cannot encode.
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace").decode()
