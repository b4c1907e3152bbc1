"""The kinds of Arrow columns that are read from sources and caption files: texts and
bytes.
"""

from __future__ import annotations

import pyarrow as pa

TEXT = "text"
BYTES = "bytes"


def column_kind(arrow_type: pa.DataType) -> str | None:
    """Return the kind of the values that an Arrow type stores: `TEXT` or `BYTES`.
    Return None for any other type, for example a list or a number.

    Arrow has several types for the same kind of value: plain, large, view, fixed size,
    dictionary-encoded, run-end-encoded, and extension types. All of them are accepted.
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
    }
    for kind, tests in kinds.items():
        if any(test(arrow_type) for test in tests):
            return kind
    return None
