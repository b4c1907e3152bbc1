"""Comparisons of columns and constants in filter expressions. Types are checked before rows are read."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage_formats.errors import UsageError
from storage_formats.format.rows import type_name

NUMBER, TEXT, TRUTH, TIME, TEXTS = "number", "text", "boolean", "timestamp", "list of texts"
TEXT_KINDS = (TEXT, TEXTS)
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_TIME_EXAMPLE = "a date and time in quotes, such as '2026-01-31T12:00'"
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True)
class Column:
    """A column of the rows table.

    Attributes:
        name: name of the column.
        arrow_type: type of the column.
    """

    name: str
    arrow_type: pa.DataType

    @property
    def kind(self) -> str:
        """Kind of the values: "number", "text", "boolean", "timestamp" or "list of texts"."""
        if pa.types.is_boolean(self.arrow_type):
            return TRUTH
        if pa.types.is_list(self.arrow_type):
            return TEXTS
        if pa.types.is_timestamp(self.arrow_type):
            return TIME
        return TEXT if pa.types.is_string(self.arrow_type) else NUMBER

    @property
    def type_name(self) -> str:
        """Name of the type, as in SPEC.md."""
        return type_name(self.arrow_type)

    def values(self, table: pa.Table) -> Any:
        """Return the values of the column in `table`."""
        return table[self.name]

    def __str__(self) -> str:
        return f"the column {self.name} ({self.type_name})"


@dataclass(frozen=True)
class Constant:
    """A constant in an expression: a number, a text, true or false."""

    value: bool | int | float | str

    @property
    def kind(self) -> str:
        """Kind of the value: "number", "text" or "boolean"."""
        if isinstance(self.value, bool):
            return TRUTH
        return TEXT if isinstance(self.value, str) else NUMBER

    def __str__(self) -> str:
        return f"the constant {str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)}"


Operand: TypeAlias = Column | Constant


def compared(left: Operand, operator: str, right: Operand) -> Callable[[pa.Table], Any]:
    """Return a function that evaluates `left operator right` on a table.

    Raises:
        UsageError: both sides are constants, or the types of the sides differ.
    """
    if isinstance(left, Constant):
        if isinstance(right, Constant):
            raise filter_error(f"{left} is compared with {right}; name a column on one side")
        return compared(right, _MIRRORED.get(operator, operator), left)
    if left.kind == TRUTH and operator in _MIRRORED:
        raise filter_error(f"{left} can be compared only with = and !=")
    if isinstance(right, Constant):
        constant = _converted(right, left)
        if pa.types.is_integer(left.arrow_type):
            operator, constant = _among_integers(operator, constant.as_py())
        compare = COMPARISONS[operator]
        return lambda table: any_text(lambda array: compare(array, constant), left.values(table))
    if left.kind != right.kind or left.kind == TEXTS:
        raise filter_error(f"{left} cannot be compared with {right}; compare numbers with numbers, or texts with texts")
    compare, wider = COMPARISONS[operator], _common_type(left, right)
    return lambda table: compare(
        left.values(table).cast(wider, safe=False), right.values(table).cast(wider, safe=False)
    )


def value_set(column: Column, constants: Sequence[Constant]) -> pa.Array:
    """Return `constants` as an array that can be compared with the values of `column`.

    Raises:
        UsageError: a constant has another type than the column.
    """
    values = [_converted(constant, column).as_py() for constant in constants]
    if column.kind != NUMBER:
        return pa.array(values, pa.string() if column.kind == TEXTS else column.arrow_type)
    if pa.types.is_integer(column.arrow_type):
        return pa.array([int(value) for value in values if _is_int64(value)], pa.int64())
    return pa.array([float(value) for value in values], pa.float64())


def any_text(condition: Callable[[Any], Any], values: Any) -> Any:
    """Return for each value whether `condition` is true.

    For a list, return whether `condition` is true for any text in it.
    """
    if not pa.types.is_list(values.type):
        return condition(values)
    lists = values.combine_chunks()
    holds = np.asarray(pc.fill_null(condition(lists.flatten()), False).to_numpy(zero_copy_only=False), dtype=np.bool_)
    result = np.zeros(len(lists), dtype=np.bool_)
    result[pc.list_parent_indices(lists).to_numpy()[holds]] = True
    return pa.chunked_array([pa.array(result, mask=pc.is_null(lists).to_numpy(zero_copy_only=False))])


def _among_integers(operator: str, number: int | float) -> tuple[str, pa.Scalar]:
    """Replace a comparison with any number by an equivalent comparison with a 64-bit integer.

    Args:
        operator: operator of the comparison `column operator number`. The column contains 64-bit integers.
        number: right side of the comparison.

    Returns:
        (operator, 64-bit integer) of a comparison with the same result for every 64-bit integer.
    """
    if _is_int64(number):
        return operator, pa.scalar(int(number))
    is_upper = operator in ("<", "<=")
    beyond = not _INT64_MIN <= number <= _INT64_MAX
    if operator in ("=", "!=", "<>") or beyond:
        always = operator in ("!=", "<>") or (operator != "=" and is_upper == (number > 0))
        return ">=" if always else "<", pa.scalar(_INT64_MIN)
    return ("<=", pa.scalar(math.floor(number))) if is_upper else (">=", pa.scalar(math.ceil(number)))


def _is_int64(number: int | float) -> bool:
    return _INT64_MIN <= number <= _INT64_MAX and int(number) == number


def _common_type(left: Column, right: Column) -> pa.DataType:
    """Return the type to which both columns are converted for a comparison."""
    if left.kind != NUMBER:
        return left.arrow_type
    integers = pa.types.is_integer(left.arrow_type) and pa.types.is_integer(right.arrow_type)
    return pa.int64() if integers else pa.float64()


def _converted(constant: Constant, column: Column) -> pa.Scalar:
    """Convert `constant` to a scalar that can be compared with the values of `column`."""
    kind = TEXT if column.kind in (TEXTS, TIME) else column.kind
    if constant.kind != kind:
        wanted = _TIME_EXAMPLE if column.kind == TIME else f"a {kind}"
        raise filter_error(f"{column} cannot be compared with {constant}; give {wanted}")
    if column.kind == NUMBER and not pa.types.is_integer(column.arrow_type):
        if float(constant.value) != constant.value:
            raise filter_error(
                f"{column} cannot be compared with {constant}, which float64 cannot represent exactly; round the number"
            )
        return pa.scalar(float(constant.value))
    if column.kind != TIME:
        return pa.scalar(constant.value)
    try:
        moment = datetime.datetime.fromisoformat(str(constant.value))
        moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        return pa.scalar(moment.astimezone(datetime.UTC), column.arrow_type)
    except (ValueError, OverflowError) as error:
        raise filter_error(f"{column} cannot be compared with {constant}; give {_TIME_EXAMPLE}") from error


def filter_error(message: str) -> UsageError:
    """Return the error to raise for an invalid filter expression."""
    return UsageError(f"invalid filter: {message}", parameter="where")
