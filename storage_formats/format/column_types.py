"""The Arrow types of source columns, and the conversion of stored columns to these
types.
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from storage_formats.format.source_columns import (
    BOOL,
    FLOAT64,
    INT64,
    STRING,
    STRINGS,
    TIMESTAMP,
    as_type,
)

ARROW_TYPES = {
    BOOL: pa.bool_(),
    INT64: pa.int64(),
    FLOAT64: pa.float64(),
    STRING: pa.string(),
    TIMESTAMP: pa.timestamp("us", tz="UTC"),
    STRINGS: pa.list_(pa.string()),
}
"""The Arrow type of each type of source column."""


TEXT = "text"
BYTES = "bytes"
NUMBER = "number"


def column_kind(arrow_type: pa.DataType) -> str | None:
    """Return whether a column holds `TEXT`, `BYTES` or `NUMBER`; None for any other
    type, for example a list.

    Every layout counts: plain, large, view, fixed size, dictionary, run-end encoded,
    and extension types that store one of them.
    """
    types = pa.types
    if types.is_dictionary(arrow_type) or types.is_run_end_encoded(arrow_type):
        return column_kind(arrow_type.value_type)
    if isinstance(arrow_type, pa.BaseExtensionType):
        return column_kind(arrow_type.storage_type)
    kinds = {
        TEXT: (types.is_string, types.is_large_string, types.is_string_view),
        BYTES: (
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
            types.is_fixed_size_binary,
        ),
        NUMBER: (types.is_integer, types.is_floating, types.is_decimal),
    }
    for kind, tests in kinds.items():
        if any(test(arrow_type) for test in tests):
            return kind
    return None


def cast_columns(
    table: pa.Table, schema: pa.Schema, source_names: Collection[str]
) -> pa.Table:
    """Return the columns of `table` with the types of `schema`.

    Args:
        source_names: names of the source columns. A source column may have a narrower
            type in `table`, or may be missing from `table`. A missing column is null in
            the result.

    Raises:
        ValueError, TypeError, pyarrow.ArrowException: a column cannot be converted.
    """
    arrays = []
    for field in schema:
        if field.name not in source_names:
            arrays.append(table[field.name].cast(field.type))
        elif field.name in table.schema.names:
            column = table[field.name]
            arrow_type = field.type
            if column.type not in ARROW_TYPES.values():
                raise ValueError(
                    f"a source column has the type {column.type}, which source columns"
                    " cannot have"
                )
            if column.type != arrow_type:
                wide = next(
                    name for name, each in ARROW_TYPES.items() if each == arrow_type
                )
                values = [
                    None if value is None else as_type(value, wide)
                    for value in column.to_pylist()
                ]
                column = pa.chunked_array([pa.array(values, arrow_type)])
            arrays.append(column)
        else:
            arrays.append(pa.nulls(len(table), field.type))
    # fails if a non-nullable column has nulls
    return pa.Table.from_arrays(arrays, names=schema.names).cast(schema)
