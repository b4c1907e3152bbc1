"""The names and types of source columns (SPEC.md section 9).

A source column is an additional column of the rows table. Its values, for example
captions, come from the sources of the images.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from storage_formats.format.file_check import parsing

Value: TypeAlias = bool | int | float | str | datetime.datetime | list[str]
"""A value of a source column. A `datetime` has a time zone."""

BOOL = "bool"
INT64 = "int64"
FLOAT64 = "float64"
STRING = "string"
TIMESTAMP = "timestamp"
STRINGS = "list<string>"

CAPTION_COLUMNS = ("captions", "caption", "text")
"""Names of columns with captions. If a row has values in several of these columns, the
first name in this order wins.
"""
RENAMED_PREFIX = "source_"
"""Prefix of the stored name of a source column whose own name is reserved, see
`stored_name`.
"""
RESERVED_PREFIX = "edje_"
"""Prefix of the names that the index keeps for itself."""
MAX_COLUMNS = 256
MAX_NAME_BYTES = 128
MAX_SHARD_BYTES = 48 << 20
"""Most bytes that the source values of one shard may have as JSON in UTF-8."""
MAX_ROW_BYTES = 16 << 10
"""Most bytes that the source values of one row may have as JSON in UTF-8."""

# kinds of values; SPEC.md section 9 defines them
_KINDS = ("bool", "int", "big-int", "float", "text", "timestamp", "texts")
# The type of a column is the first one whose kinds include all kinds of the column, or
# `STRING` if there is none. A column with the kind "texts" has the type `STRINGS`.
_TYPES_OF_KINDS = (
    ({"bool"}, BOOL),
    ({"int", "big-int"}, INT64),
    ({"int", "float"}, FLOAT64),
    ({"timestamp"}, TIMESTAMP),
)
WIDER_TYPES = {INT64: FLOAT64, STRING: STRINGS}
"""The type to which a column may change when rows of arrays are appended, by its type
before. Filters that read the column stay valid.
"""
_EXACT_IN_FLOAT64 = 1 << 53
# Every integer of at most 18 digits fits into 64 bits.
_INTEGER = re.compile(r"0|-?[1-9]\d{0,17}")
_FRACTION = re.compile(r"-?(0|[1-9]\d*)(\.\d+([eE][+-]?\d{1,2})?|[eE][+-]?\d{1,2})")
# control characters, and lone surrogates, which UTF-8 cannot encode
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class PlainText(str):
    """A text from a format without types, for example CSV. Its kind depends on the
    text, so "1.5" has the kind "float".
    """


@dataclass(frozen=True)
class SourceColumn:
    """A source column of an index.

    Attributes:
        name: stored name of the column, see `stored_name`.
        kinds: kinds of the values in the column, sorted; see `kind_of`. The kinds
            determine the type of the column.
        values: number of rows with a value, including deleted rows.
    """

    name: str
    kinds: tuple[str, ...]
    values: int

    @property
    def type(self) -> str:
        """The type of the column: `BOOL`, `INT64`, `FLOAT64`, `STRING`, `TIMESTAMP` or
        `STRINGS`. All values of the column can be converted to this type without loss.
        """
        return _type_of(frozenset(self.kinds))

    def fits(self, value: Value) -> bool:
        """Return True if the column would keep its type after `value` was added."""
        return self.type_with([value]) == self.type

    def type_with(self, values: Iterable[Value | None]) -> str:
        """The type of the column after `values` were added."""
        kinds = (kind_of(value) for value in values if value is not None)
        return _type_of(frozenset((*self.kinds, *kinds)))


@functools.cache
def _type_of(kinds: frozenset[str]) -> str:
    exact = (name for accepted, name in _TYPES_OF_KINDS if kinds <= accepted)
    return STRINGS if "texts" in kinds else next(exact, STRING)


def check_columns(columns: Collection[SourceColumn]) -> None:
    """Raise ValueError if there are more than `MAX_COLUMNS` columns, two columns have
    the same name, or a name or a kind is not allowed.
    """
    for column in columns:
        has_kinds = column.kinds and {*column.kinds} <= {*_KINDS}
        if not has_kinds or not is_allowed(column.name):
            raise ValueError(f"{column} is not a source column")
    names = {column.name for column in columns}
    if len(columns) > MAX_COLUMNS or len(names) < len(columns):
        raise ValueError(
            f"got {len(columns)} source columns; at most {MAX_COLUMNS} with distinct"
            " names are allowed"
        )


def caption_columns(columns: Iterable[SourceColumn]) -> list[str]:
    """Return the names of the columns with captions: those of `CAPTION_COLUMNS` that
    are in `columns` and hold texts.
    """
    texts = {each.name for each in columns if each.type in (STRING, STRINGS)}
    return [name for name in CAPTION_COLUMNS if name in texts]


def captions_of(row: Mapping[str, Any]) -> list[str]:
    """Return the captions of a row: the value of the first of `CAPTION_COLUMNS` in
    which the row has a value, as a list.

    Args:
        row: mapping from column name to value, with the columns that `caption_columns`
            returned.
    """
    value: Any = next((row[name] for name in CAPTION_COLUMNS if row.get(name)), [])
    return value if isinstance(value, list) else [value]


class CountedColumns:
    """Collects the kinds and counts the values of source columns, value by value.

    Args:
        earlier: columns to which the counted values are added. Columns of the same
            name are merged to one.

    Attributes:
        kinds: kinds of the values so far, by column name.
        values: number of values so far, by column name.
    """

    def __init__(self, earlier: Iterable[SourceColumn] = ()) -> None:
        self.kinds = defaultdict[str, set[str]](set)
        self.values = Counter[str]()
        for column in earlier:
            self.kinds[column.name].update(column.kinds)
            self.values[column.name] += column.values

    def count(self, name: str, value: Value) -> None:
        """Count one more value of the column `name`."""
        self.kinds[name].add(kind_of(value))
        self.values[name] += 1

    def columns(self) -> tuple[SourceColumn, ...]:
        """Return the columns, sorted by name."""
        return tuple(
            SourceColumn(name, tuple(sorted(kinds)), self.values[name])
            for name, kinds in sorted(self.kinds.items())
        )


def python_value(value: Any) -> Any:
    """Return `value` as a Python object if it is a scalar or array of NumPy or PyTorch,
    a scalar of Arrow, or a time of pandas. Return any other value unchanged.

    A time is converted to a `datetime` in UTC; a time without a time zone is taken to
    be in UTC. A missing time (NaT) becomes None.

    Raises:
        OverflowError: a time in UTC is not in the years 1 to 9999.
    """
    if hasattr(value, "as_py"):
        value = value.as_py()
    if isinstance(value, np.datetime64):
        value = value.astype("M8[us]").tolist()
        # NumPy returns an int if Python cannot represent the time as a datetime.
        if isinstance(value, int):
            raise OverflowError("time out of range")
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, datetime.datetime):
        return value
    # The missing time of pandas is a datetime that differs from itself.
    if value != value:
        return None
    if value.tzinfo is None:
        return value.replace(tzinfo=datetime.UTC)
    return value.astimezone(datetime.UTC)


def is_allowed(name: str) -> bool:
    """Return True if a source column may have this name: the name is not blank, has
    only printable characters, and takes at most `MAX_NAME_BYTES` bytes in UTF-8.
    """
    if not name.strip() or _UNPRINTABLE.search(name):
        return False
    return len(name.encode()) <= MAX_NAME_BYTES


def stored_name(name: str, standard_names: Iterable[str]) -> str:
    """Return the name under which the index stores a source column.

    If the rows table uses or reserves `name`, the result is `name` with the prefix
    "source_". A reserved name that already has this prefix gets another one, so that
    different names have different results.

    Args:
        standard_names: names of the standard columns of the rows table.
    """
    unprefixed = name
    while unprefixed.startswith(RENAMED_PREFIX):
        unprefixed = unprefixed.removeprefix(RENAMED_PREFIX)
    is_taken = unprefixed in standard_names or unprefixed.startswith(RESERVED_PREFIX)
    return f"{RENAMED_PREFIX}{name}" if is_taken else name


def kind_of(value: Value) -> str:
    """Return the kind of a value: "bool", "int", "big-int", "float", "text",
    "timestamp" or "texts".

    A "big-int" is an integer with a magnitude above 2^53. float64 cannot represent all
    such integers exactly.
    """
    if isinstance(value, PlainText):
        if value.lower() in ("true", "false"):
            return "bool"
        if _INTEGER.fullmatch(value):
            return kind_of(int(value))
        return "float" if _FRACTION.fullmatch(value) else "text"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if abs(value) <= _EXACT_IN_FLOAT64 else "big-int"
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "text"
    return "timestamp" if isinstance(value, datetime.datetime) else "texts"


def text_of(value: Value) -> str:
    """Return a value as text: a string unchanged, a timestamp in ISO 8601 format,
    any other value as JSON.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).isoformat()
    return json.dumps(value, ensure_ascii=False)


def metadata_text(metadata: Mapping[str, Value | None]) -> str:
    """Return `metadata` as JSON with sorted keys. Timestamps are written in ISO
    8601.
    """
    return json.dumps(
        metadata,
        ensure_ascii=False,
        sort_keys=True,
        separators=(",", ":"),
        default=text_of,
    )


def source_values_text(values: Mapping[str, Value | None]) -> str | None:
    """Return the text that a row stores in `SOURCE_VALUES`: the values that the sources
    gave to the columns that users have set, as a JSON object. None if there are none.
    """
    return metadata_text(values) if values else None


def values_of_sources(
    text: str | None, columns: Mapping[str, SourceColumn]
) -> dict[str, Value | None]:
    """Return the values in `text`, a result of `source_values_text`, converted to the
    types of their columns where this is possible.

    Raises:
        CorruptIndexError: `text` is not such a result.
    """
    typed = {}
    with parsing("the source values of a row"):
        values: dict[str, Value | None] = json.loads(text or "{}")
        for name, value in values.items():
            typed[name] = value
            if name in columns and value is not None:
                column = columns[name]
                # Timestamps are stored as text, in ISO 8601 format.
                if isinstance(value, str) or column.fits(value):
                    with contextlib.suppress(ValueError):
                        typed[name] = as_type(value, column.type)
    return typed


def parsed(value: Value) -> Value:
    """Return a value with the type that its text has. For example, the text "1.5" of a
    CSV file becomes the float 1.5. Other values are returned unchanged.
    """
    if not isinstance(value, PlainText):
        return value
    return as_type(value, _type_of(frozenset([kind_of(value)])))


def as_type(value: Value, column_type: str) -> Value:
    """Convert a value to a column type. For example, the text "1.5" becomes the float
    1.5 for the type `FLOAT64`.

    Raises:
        ValueError, TypeError: the value cannot be converted.
    """
    if column_type == STRINGS:
        return value if isinstance(value, list) else [text_of(value)]
    if column_type == STRING:
        return text_of(value)
    if isinstance(value, list):
        raise TypeError(f"a column of type {column_type} cannot store a list")
    if column_type == TIMESTAMP:
        return (
            value
            if isinstance(value, datetime.datetime)
            else datetime.datetime.fromisoformat(str(value))
        )
    if column_type == BOOL:
        return value.lower() == "true" if isinstance(value, str) else bool(value)
    if isinstance(value, datetime.datetime):
        raise TypeError(f"a column of type {column_type} cannot store a time")
    if column_type == INT64 and isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value} is not an integer")
    return int(value) if column_type == INT64 else float(value)
