"""A memory-mapped table of inputs, to read the input of any row without a list of all inputs in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from edje_index.images.containers.container import Container
from edje_index.images.inputs import InputRef
from storage_formats.atomic import fsync_paths, naming
from storage_formats.errors import CorruptIndexError

_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("path", pa.binary(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64()),
        pa.field("member", pa.bool_(), nullable=False),
        pa.field("container", pa.string()),
    ]
)
_BATCH = 1 << 14


def write_input_table(path: Path, refs: Iterable[InputRef]) -> int:
    """Write the inputs `refs` in row order to an Arrow file, and return the number of inputs.

    If writing fails, `path` does not change.
    """
    temporary, rows = path.with_name(f".{path.name}.part"), 0
    remaining = iter(refs)
    with naming(path), pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        while batch := list(itertools.islice(remaining, _BATCH)):
            columns = {field.name: [getattr(ref, field.name) for ref in batch] for field in _SCHEMA}
            columns["container"] = [container and str(container) for container in columns["container"]]
            writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
            rows += len(batch)
    fsync_paths([temporary])
    temporary.replace(path)
    fsync_paths([path.parent])
    return rows


class InputTable:
    """The inputs that `write_input_table` wrote to `path`. Thread-safe.

    Raises:
        CorruptIndexError: the file is missing or is not a table of inputs.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            if self._table.schema != _SCHEMA:
                raise ValueError("it has other columns")
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CorruptIndexError(
                f"cannot read the table of inputs {path}: {error}; remove it to make it again"
            ) from error

    def __len__(self) -> int:
        return len(self._table)

    def refs(self, rows: NDArray[np.int64]) -> list[InputRef]:
        """Return the inputs of `rows`, in this order."""
        return [_ref(self._table.slice(row, 1).to_pylist()[0]) for row in rows.tolist()]


def _ref(values: dict[str, Any]) -> InputRef:
    container = values.pop("container")
    return InputRef(**values, container=container and Container.parse(container))
