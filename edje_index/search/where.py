"""Filter expressions over the columns of the rows table, such as `width > 800 and licence = 'cc0'`.

Expressions from untrusted users are safe: an expression can only compare columns and constants, and the size of an
expression is limited.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lark import Lark, Token
from lark.exceptions import UnexpectedInput, UnexpectedToken, VisitError
from lark.visitors import Transformer_NonRecursive, v_args
from numpy.typing import NDArray

from edje_index.search.where_columns import (
    TEXT_KINDS,
    TRUTH,
    Column,
    Constant,
    Operand,
    any_text,
    compared,
    filter_error,
    value_set,
)
from edje_index.search.where_grammar import GRAMMAR

MAX_CHARACTERS = 4096
MAX_PARTS = 100
"""Largest number of conditions, and of `not`, `and` and `or`, in an expression."""
MAX_WILDCARDS = 8
"""Largest number of % and _ in a pattern, which bounds the time of a match."""

Condition: TypeAlias = Callable[[pa.Table], Any]
"""Computes for each row of a table whether the row passes; null if a compared value is null."""

_EXAMPLE = "write conditions such as width > 800 and uri like '%.jpg'"
_SHOWN = 30
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class Where:
    """A filter expression that is valid for the columns of an index.

    Attributes:
        columns: sorted names of the columns that the expression reads.
        condition: function that evaluates the expression on a table.
    """

    columns: tuple[str, ...]
    condition: Condition

    def passes(self, table: pa.Table) -> NDArray[np.bool_]:
        """Return which rows of `table` pass, bool [rows].

        As in SQL, a row does not pass if the result of the expression is null.
        """
        mask: NDArray[np.bool_] = pc.fill_null(self.condition(table), False).to_numpy()
        return mask


def parse_where(text: str, schema: pa.Schema) -> Where:
    """Parse a filter expression and check its types.

    Args:
        text: the expression.
        schema: columns that the expression may name.

    Raises:
        UsageError: the expression is too long or malformed, names an unknown column, or compares different types.
    """
    if len(text) > MAX_CHARACTERS:
        raise filter_error(f"the filter has {len(text)} characters, more than {MAX_CHARACTERS}; shorten the filter")
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        raise filter_error(f"{_failure(text, error)}; {_EXAMPLE}") from error
    checks = _Checks(schema)
    try:
        condition = checks.transform(tree)
    except VisitError as error:
        raise error.orig_exc from None
    return Where(tuple(sorted(checks.columns)), condition)


@functools.cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr", maybe_placeholders=False)


def _failure(text: str, error: UnexpectedInput) -> str:
    if not text.strip():
        return "the filter is empty"
    if isinstance(error, UnexpectedToken) and error.token.type == "$END":
        return f"the filter ends too early, after {text.rstrip()[-_SHOWN:]!r}"
    position = error.pos_in_stream or 0
    return f"the filter cannot be read from character {position + 1} on, {text[position : position + _SHOWN]!r}"


@v_args(inline=True)
class _Checks(Transformer_NonRecursive):  # type: ignore[type-arg]
    """Converts the syntax tree of an expression to a condition, from the leaves to the root.

    Attributes:
        columns: names of the columns that the expression reads.
    """

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__()
        self._schema = schema
        self._parts = 0
        self.columns: set[str] = set()

    def column(self, name: Token) -> Column:
        return self._column(str(name), "; write 'is null'" if name.lower() == "null" else "")

    def quoted_column(self, name: Token) -> Column:
        return self._column(name[1:-1].replace('""', '"'), "; a text is written in single quotes")

    def text(self, text: Token) -> Constant:
        return Constant(text[1:-1].replace("''", "'"))

    def integer(self, digits: Token) -> Constant:
        if len(digits) > 20 or int(digits) not in _INT64:
            raise filter_error(
                f"the number {digits[:_SHOWN]} does not fit in 64 bits; write a number of at most 18 digits"
            )
        return Constant(int(digits))

    def fraction(self, digits: Token) -> Constant:
        return Constant(float(digits))

    def true(self) -> Constant:
        return Constant(True)

    def false(self) -> Constant:
        return Constant(False)

    def comparison(self, left: Operand, operator: Token, right: Operand) -> Condition:
        self._count()
        return compared(left, str(operator), right)

    def truth(self, operand: Operand) -> Condition:
        self._count()
        if not isinstance(operand, Column) or operand.kind != TRUTH:
            raise filter_error(f"{operand} is not a condition; {_EXAMPLE}")
        return operand.values

    def is_null(self, operand: Operand) -> Condition:
        column = self._only_column(operand)
        return lambda table: pc.is_null(column.values(table))

    def is_not_null(self, operand: Operand) -> Condition:
        column = self._only_column(operand)
        return lambda table: pc.is_valid(column.values(table))

    def one_of(self, operand: Operand, *constants: Constant) -> Condition:
        column = self._only_column(operand)
        values = value_set(column, constants)

        def is_in(array: Any) -> Any:
            found = pc.is_in(array.cast(values.type), value_set=values)
            return pc.if_else(pc.is_valid(array), found, pa.scalar(None, pa.bool_()))

        return lambda table: any_text(is_in, column.values(table))

    def like(self, operand: Operand, pattern: Constant) -> Condition:
        column, text = self._only_column(operand), str(pattern.value)
        if column.kind not in TEXT_KINDS:
            raise filter_error(f"'like' needs a column of texts, not {column}")
        if sum(map(text.count, "%_")) > MAX_WILDCARDS:
            raise filter_error(f"the pattern {text[:_SHOWN]!r} has more than {MAX_WILDCARDS} wildcards; use fewer")
        return lambda table: any_text(lambda array: pc.match_like(array, text), column.values(table))

    def none_of(self, operand: Operand, *constants: Constant) -> Condition:
        return self.negation(self.one_of(operand, *constants))

    def not_like(self, operand: Operand, pattern: Constant) -> Condition:
        return self.negation(self.like(operand, pattern))

    def negation(self, condition: Condition) -> Condition:
        self._count()
        return lambda table: pc.invert(condition(table))

    def conjunction(self, *conditions: Condition) -> Condition:
        self._count()
        return lambda table: functools.reduce(pc.and_kleene, (condition(table) for condition in conditions))

    def disjunction(self, *conditions: Condition) -> Condition:
        self._count()
        return lambda table: functools.reduce(pc.or_kleene, (condition(table) for condition in conditions))

    def _count(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise filter_error(f"the filter has more than {MAX_PARTS} conditions; shorten the filter")

    def _column(self, name: str, hint: str) -> Column:
        if name not in self._schema.names:
            raise filter_error(f"there is no column {name}{hint}; the columns are {described_columns(self._schema)}")
        self.columns.add(name)
        return Column(name, self._schema.field(name).type)

    def _only_column(self, operand: Operand) -> Column:
        self._count()
        if not isinstance(operand, Column):
            raise filter_error(f"{operand} is not a column; {_EXAMPLE}")
        return operand


def described_columns(schema: pa.Schema) -> str:
    """Return the names and types of the columns, for error messages."""
    return ", ".join(f"{field.name} ({Column(field.name, field.type).type_name})" for field in schema)
