"""Filter expressions over the columns of the rows table, such as `width > 800 and
licence = 'cc0'`.

Expressions from untrusted users are safe: an expression can only compare columns and
constants, and the size of an expression is limited. Types are checked before rows are
read.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lark import Lark, Token
from lark.exceptions import UnexpectedInput, UnexpectedToken, VisitError
from lark.visitors import Transformer_NonRecursive, v_args

from storage_formats.arguments import did_you_mean
from storage_formats.arrays import Bools
from storage_formats.errors import UsageError
from storage_formats.format.rows import standard_last, type_name
from storage_formats.format.source_columns import python_value

MAX_CHARACTERS = 4096
MAX_PARTS = 100
"""Largest size of an expression. The size is the number of conditions, plus one for
each `not`, plus one for each sequence of conditions that `and` or `or` joins.
"""
MAX_WILDCARDS = 8
"""Largest number of the wildcards % and _ in a pattern of `like`. The limit bounds the
time of a match.
"""

Condition: TypeAlias = Callable[[pa.Table], Any]
"""A function that returns for each row of a table whether the row passes the condition,
or null if a compared value is null.
"""

# The grammar is a subset of SQL. An LALR parser reads it in linear time and without
# recursion, so an expression from an untrusted user cannot exhaust the stack.
_GRAMMAR = r"""
?start: disjunction
?disjunction: conjunction ("or"i conjunction)*
?conjunction: condition ("and"i condition)*
?condition: NOT condition -> negation
    | name COMPARISON (name | literal) -> comparison
    | name "is"i [NOT] "null"i -> is_null
    | name [NOT] "in"i "(" literal ("," literal)* ")" -> one_of
    | name [NOT] "like"i text -> like
    | name -> truth
    | "(" disjunction ")"
?name: NAME -> column
    | QUOTED_NAME -> quoted_column
?literal: text
    | INTEGER -> integer
    | FRACTION -> fraction
    | "true"i -> true
    | "false"i -> false
text: TEXT

NOT: "not"i
COMPARISON: "=" | "!=" | "<>" | "<=" | ">=" | "<" | ">"
NAME: /[^\W\d][\w.]*/i
QUOTED_NAME: /"(?:[^"]|"")+"/
TEXT: /'(?:[^']|'')*'/
FRACTION.2: /[+-]?(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?\d+[eE][+-]?\d+/
INTEGER: /[+-]?\d+/
%ignore /\s+/
"""
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_NUMBER = "number"
_TEXT = "text"
_TRUTH = "boolean"
_TIME = "timestamp"
_TEXTS = "list of texts"
_EXAMPLE = "write conditions such as width > 800 and uri like '%.jpg'"
_SHOWN = 30

_Constant: TypeAlias = bool | int | float | str
_Operand: TypeAlias = pa.Field | _Constant


def parse_where(
    text: str, schema: pa.Schema
) -> tuple[list[str], Callable[[pa.Table], Bools]]:
    """Parse a filter expression and check its types.

    Args:
        text: the expression.
        schema: columns that the expression may name.

    Returns:
        The sorted names of the columns that the expression reads, and a function that
        takes a table of k rows with these columns and returns which rows pass, bool
        [k]. As in SQL, a row does not pass if the value of the expression is null. A
        condition on a column of lists of texts holds if it holds for at least one text
        of the list. A negated condition (`!=`, `not in`, `not like`) holds if no text
        of the list matches.

    Raises:
        UsageError: the expression is too long or malformed, names an unknown column, or
            compares different types.
    """
    if len(text) > MAX_CHARACTERS:
        raise _error(
            f"the filter has {len(text)} characters, more than {MAX_CHARACTERS};"
            " shorten the filter"
        )
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        at = error.pos_in_stream or 0
        problem = (
            f"the filter cannot be read from character {at + 1} on,"
            f" {text[at : at + _SHOWN]!r}"
        )
        if not text.strip():
            problem = "the filter is empty"
        elif isinstance(error, UnexpectedToken) and error.token.type == "$END":
            problem = f"the filter ends too early, after {text.rstrip()[-_SHOWN:]!r}"
        raise _error(f"{problem}; {_EXAMPLE}") from error
    conditions = _Conditions(schema)
    try:
        condition = conditions.transform(tree)
    except VisitError as error:
        raise error.orig_exc from None

    def passes(table: pa.Table) -> Bools:
        mask: Bools = pc.fill_null(condition(table), False).to_numpy()
        return mask

    return sorted(conditions.columns), passes


@functools.cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr")


def _error(message: str) -> UsageError:
    return UsageError(f"invalid filter: {message}", parameter="where")


def _kind(operand: _Operand) -> str:
    """Return the kind of a constant or of the values of a column: "number", "text",
    "boolean", "timestamp" or "list of texts".
    """
    if isinstance(operand, bool):
        return _TRUTH
    if isinstance(operand, str):
        return _TEXT
    if not isinstance(operand, pa.Field):
        return _NUMBER
    if pa.types.is_boolean(operand.type):
        return _TRUTH
    if pa.types.is_list(operand.type):
        return _TEXTS
    if pa.types.is_timestamp(operand.type):
        return _TIME
    return _TEXT if pa.types.is_string(operand.type) else _NUMBER


def _named(operand: _Operand) -> str:
    """Return a description of `operand` for error messages."""
    if isinstance(operand, pa.Field):
        return f"the column {operand.name} ({type_name(operand.type)})"
    return (
        "the constant"
        f" {str(operand).lower() if isinstance(operand, bool) else repr(operand)}"
    )


def _scalar(column: pa.Field, constant: _Constant) -> pa.Scalar:
    """Convert `constant` to a scalar that can be compared with the values of `column`.
    Raise UsageError if they cannot be compared.
    """
    kind = _kind(column)
    try:
        if _kind(constant) != (_TEXT if kind in (_TEXTS, _TIME) else kind):
            raise ValueError("another kind")
        if kind == _TIME:
            # `fromisoformat` would drop the digits after the microseconds, and the
            # comparison would be wrong.
            if re.search(r"[.,]\d{6}0*[1-9]", str(constant)):
                raise ValueError("finer than a microsecond")
            moment = datetime.datetime.fromisoformat(str(constant))
            return pa.scalar(python_value(moment), column.type)
        # `cast` raises an error for a number that it would have to round.
        if kind == _NUMBER:
            return pa.scalar(constant).cast(
                pa.int64() if pa.types.is_integer(column.type) else pa.float64()
            )
        return pa.scalar(constant)
    except (ValueError, OverflowError) as error:
        wanted = {
            _TIME: (
                "a date and time in quotes, in microseconds at the finest, such as"
                " '2026-01-31T12:00'"
            ),
            _NUMBER: (
                "a whole number"
                if pa.types.is_integer(column.type)
                else "a number of 64 bits"
            ),
            _TRUTH: "true or false",
        }.get(kind, "a text")
        raise _error(
            f"{_named(column)} cannot be compared with {_named(constant)}; give"
            f" {wanted}"
        ) from error


@v_args(inline=True)
class _Conditions(Transformer_NonRecursive):  # type: ignore[type-arg]
    """Converts the syntax tree of an expression to a condition, from the leaves to the
    root.

    Attributes:
        columns: names of the columns that the expression reads.
    """

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__()
        self._schema = schema
        self._parts = 0
        self.columns: set[str] = set()

    def column(self, name: Token) -> pa.Field:
        return self._column(
            str(name),
            "; write 'is null'"
            if name.lower() == "null"
            else f"; if it is a text, write '{name}' in quotes",
        )

    def quoted_column(self, name: Token) -> pa.Field:
        return self._column(
            name[1:-1].replace('""', '"'), "; a text is written in single quotes"
        )

    def _column(self, name: str, hint: str) -> pa.Field:
        if name not in self._schema.names:
            names = self._schema.names
            columns = ", ".join(
                f"{each} ({type_name(self._schema.field(each).type)})"
                for each in standard_last(names)
            )
            raise _error(
                f"there is no column {name}{did_you_mean(name, names)}{hint}; the"
                f" columns are {columns}"
            )
        self.columns.add(name)
        return self._schema.field(name)

    def text(self, text: Token) -> str:
        return text[1:-1].replace("''", "'")

    def integer(self, digits: Token) -> int:
        if len(digits) > 20 or abs(int(digits)) >= 1 << 63:
            raise _error(
                f"the number {digits[:_SHOWN]} does not fit in 64 bits; write a number"
                " of at most 18 digits"
            )
        return int(digits)

    fraction = float

    def true(self) -> bool:
        return True

    def false(self) -> bool:
        return False

    def comparison(self, left: pa.Field, operator: str, right: _Operand) -> Condition:
        if operator in ("!=", "<>"):
            # On a list of texts, != means that no text of the list equals the constant.
            # So the result of = for the whole list is negated. Applying != to each text
            # would mean that at least one text differs.
            equal = self.comparison(left, "=", right)
            return lambda table: pc.invert(equal(table))
        self._count()
        kind = _kind(left)
        name = left.name
        compare = _COMPARISONS[operator]
        if kind == _TRUTH and operator != "=":
            raise _error(f"{_named(left)} can be compared only with = and !=")
        if not isinstance(right, pa.Field):
            constant = _scalar(left, right)
            return lambda table: _any_text(
                lambda array: compare(array, constant), table[name]
            )
        if kind != _kind(right) or kind == _TEXTS:
            problem = f"{_named(left)} cannot be compared with {_named(right)}"
            raise _error(
                f"{problem}; compare numbers with numbers, or texts with texts"
            )
        # Two columns of numbers are compared in a type that holds the values of both.
        other = right.name
        wider = left.type
        if kind == _NUMBER:
            integers = pa.types.is_integer(left.type) and pa.types.is_integer(
                right.type
            )
            wider = pa.int64() if integers else pa.float64()
        return lambda table: compare(
            table[name].cast(wider, safe=False), table[other].cast(wider, safe=False)
        )

    def truth(self, column: pa.Field) -> Condition:
        self._count()
        if _kind(column) != _TRUTH:
            raise _error(f"{_named(column)} is not a condition; {_EXAMPLE}")
        return lambda table: table[column.name]

    def is_null(self, column: pa.Field, negated: Token | None) -> Condition:
        self._count()
        return self.negation(negated, lambda table: pc.is_null(table[column.name]))

    def one_of(
        self, column: pa.Field, negated: Token | None, *constants: _Constant
    ) -> Condition:
        self._count()
        scalars = [_scalar(column, constant) for constant in constants]
        values = pa.array([scalar.as_py() for scalar in scalars], scalars[0].type)

        def is_in(array: Any) -> Any:
            present = pc.is_in(array.cast(values.type), value_set=values)
            return pc.if_else(pc.is_valid(array), present, pa.scalar(None, pa.bool_()))

        return self.negation(
            negated, lambda table: _any_text(is_in, table[column.name])
        )

    def like(self, column: pa.Field, negated: Token | None, pattern: str) -> Condition:
        self._count()
        if _kind(column) not in (_TEXT, _TEXTS):
            raise _error(f"'like' needs a column of texts, not {_named(column)}")
        if sum(map(pattern.count, "%_")) > MAX_WILDCARDS:
            raise _error(
                f"the pattern {pattern[:_SHOWN]!r} has more than {MAX_WILDCARDS}"
                " wildcards; use fewer"
            )
        return self.negation(
            negated,
            lambda table: _any_text(
                lambda array: _matches(array, pattern), table[column.name]
            ),
        )

    def negation(self, negated: Token | None, condition: Condition) -> Condition:
        if negated is None:
            return condition
        self._count()
        return lambda table: pc.invert(condition(table))

    def conjunction(self, *conditions: Condition) -> Condition:
        self._count()
        return lambda table: functools.reduce(
            pc.and_kleene, (condition(table) for condition in conditions)
        )

    def disjunction(self, *conditions: Condition) -> Condition:
        self._count()
        return lambda table: functools.reduce(
            pc.or_kleene, (condition(table) for condition in conditions)
        )

    def _count(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _error(
                f"the filter has more than {MAX_PARTS} conditions; shorten the filter"
            )


def _matches(array: Any, pattern: str) -> Any:
    """Return which texts of `array` match the pattern of a `like` as a whole."""
    if "\\" not in pattern:
        return pc.match_like(array, pattern)
    # PyArrow would take a backslash for an escape.
    wildcards = {"%": ".*", "_": "."}
    parts = [wildcards.get(each, f"\\x{{{ord(each):x}}}") for each in pattern]
    return pc.match_substring_regex(array, f"(?s)^{''.join(parts)}$")


def _any_text(condition: Callable[[Any], Any], values: Any) -> Any:
    """Return `condition` of `values`. If the values are lists of texts, return for each
    list whether `condition` is true for at least one text; null for a null list.
    """
    if not pa.types.is_list(values.type):
        return condition(values)
    lists = values.combine_chunks()
    holds = np.asarray(
        pc.fill_null(condition(lists.flatten()), False).to_numpy(zero_copy_only=False),
        dtype=np.bool_,
    )
    result = np.zeros(len(lists), dtype=np.bool_)
    result[pc.list_parent_indices(lists).to_numpy()[holds]] = True
    return pa.chunked_array(
        [pa.array(result, mask=pc.is_null(lists).to_numpy(zero_copy_only=False))]
    )
