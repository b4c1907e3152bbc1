"""Reads the metadata of images from columns of a list, or from `.json` and `.txt` files next to the images.

The metadata becomes source columns of the rows table (SPEC.md section 9).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pipelines.sources.selection import Ignored
from storage_formats.format.source_columns import Value, is_allowed, stored_name

CAPTIONS = "captions"
"""Name of the column with the lines of a `.txt` file beside an image."""

SIDECAR_SUFFIXES = (".json", ".txt")
MAX_SIDECAR_BYTES = 1 << 20
UNREADABLE = "(unreadable metadata)"
BAD_NAME = "(column name not allowed)"
_INT64 = range(-(1 << 63), 1 << 63)


def source_values(values: Mapping[Any, Any], ignored: Ignored) -> dict[str, Value] | None:
    """Return the metadata of one image by column name; None if there is no value.

    Nulls are left out. A value of a type that the rows table does not support, such as a JSON object, becomes text.

    Args:
        values: values by name, from JSON, Parquet or CSV.
        ignored: counter for names that a column cannot have.
    """
    standard_names = _standard_names()
    result: dict[str, Value] = {}
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(name, str) or not is_allowed(column := stored_name(name, standard_names)):
            ignored.count(BAD_NAME)
        else:
            result[column] = _typed(value)
    return result or None


def sidecar_values(read: Mapping[str, Callable[[], bytes]], ignored: Ignored) -> dict[str, Value] | None:
    """Return the metadata in the files next to an image; None if there is no metadata.

    The `.json` file contains an object of values. Each line of the `.txt` file is a caption.

    Args:
        read: functions that return the content of a file, by suffix (see `SIDECAR_SUFFIXES`). The functions raise
            ValueError if the file cannot be used.
        ignored: counter for files that cannot be read and for names that a column cannot have.
    """
    values: dict[str, Any] = {}
    for suffix, read_file in sorted(read.items()):  # the object comes first, so that its captions win
        try:
            text = read_file().decode("utf-8-sig")
            parsed = json.loads(text) if suffix == ".json" else {CAPTIONS: _lines(text)}
        except (ValueError, RecursionError):
            ignored.count(UNREADABLE)
            continue
        if isinstance(parsed, dict):
            values = {**parsed, **values}
        else:
            ignored.count(UNREADABLE)
    return source_values(values, ignored)


def _lines(text: str) -> list[str] | None:
    return [line.strip() for line in text.splitlines() if line.strip()] or None


def _standard_names() -> Iterable[str]:
    from storage_formats.format.rows import ROW_SCHEMA

    names: list[str] = ROW_SCHEMA.names
    return names


def _typed(value: Any) -> Value:
    """Convert a value to one of the types of source columns."""
    if isinstance(value, str):
        return value if value.isascii() else type(value)(_as_unicode(value))
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if value in _INT64 else str(value)
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC) if value.tzinfo else value.replace(tzinfo=datetime.UTC)
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [_as_unicode(item) for item in value]
    return _as_unicode(
        json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)
    )


def _as_unicode(text: str) -> str:
    """Return `text` with lone surrogates, which UTF-8 cannot encode, replaced by escapes such as \\udc80."""
    return text.encode("utf-8", "backslashreplace").decode()
