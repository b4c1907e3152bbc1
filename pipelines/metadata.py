"""Reads the metadata of images from columns of a list, or from `.json` and `.txt` files
next to the images.

The metadata becomes source columns of the rows table (SPEC.md section 9).
"""

from __future__ import annotations

import datetime
import json
import math
import re
import threading
from collections.abc import Mapping
from typing import Any

from edje_index.inputs.tables import BAD_NAME, UNREADABLE
from storage_formats.format.source_columns import (
    Value,
    is_allowed,
    python_value,
    stored_name,
)

# key under which `Ignored` counts numbers that cannot be stored
NOT_FINITE = "(number not finite)"
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
    values: Mapping[Any, Any], ignored: Ignored, *, renames: bool = True
) -> dict[str, Value] | None:
    """Return the metadata of one image by column name; None if there is no value. If
    `renames` is True, the names are those under which the index stores the columns, see
    `stored_name`.

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
        column = name
        if renames and isinstance(name, str):
            column = stored_name(name, ROW_SCHEMA.names)
        if isinstance(column, str) and is_allowed(column):
            result[column] = _typed(checked)
        else:
            ignored.count(BAD_NAME)
    return result or None


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
